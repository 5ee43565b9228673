"""An ONNX file that says itself where its nodes run."""

from __future__ import annotations

from dataclasses import dataclass

from placement.exporters import Exported
from placement.exporters._onnx import read_model
from placement.importers.onnx_model import node_names
from placement.plan import Plan
from placement.problem import Problem


@dataclass(frozen=True)
class Onnx:
    """The model with ``device_configurations`` and ``pipeline_stage`` on every node.

    Format: ``onnx.proto``, IR version 11 ("Multi-device configuration"): the model's
    ``configuration`` lists the devices; each node has the number of its pipeline stage (a run of
    operators on one device, in the plan's order) and, for each output, the device where it is.
    Constants are with their readers and have none. Every plan can be expressed.

    Attributes:
        model: the ONNX file that the plan was made from.
        configuration: name of the configuration; one of that name is replaced.
    """

    model: str = ""
    configuration: str = "placement"

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        model = read_model(plan, self.model)
        devices = [d.name for d in plan.cluster.devices]
        model.ir_version = max(model.ir_version, 11)
        others = [x for x in model.configuration if x.name != self.configuration]
        del model.configuration[:]
        model.configuration.extend(others)
        model.configuration.add(name=self.configuration, num_devices=len(devices), device=devices)
        stage = [i for i, s in enumerate(plan.stages) for _ in range(s.num_ops)]
        # By name: the plan numbers operators topologically, the file need not.
        of = dict(zip(plan.assignment, stage, strict=True))
        for node, name in zip(model.graph.node, node_names(model.graph.node), strict=True):
            configurations = [
                x for x in node.device_configurations if x.configuration_id != self.configuration
            ]
            del node.device_configurations[:]
            node.device_configurations.extend(configurations)
            if name not in of:
                continue
            device = devices.index(plan.assignment[name])
            entry = node.device_configurations.add(
                configuration_id=self.configuration, pipeline_stage=of[name]
            )
            for output in filter(None, node.output):
                entry.sharding_spec.add(tensor_name=output, device=[device])
        return Exported(
            {"": model.SerializeToString()},
            f"IR version {model.ir_version}, {len(plan.stages)} stages; keep the model beside its "
            "external data, if it has some",
        )
