"""OpenVINO HETERO: the affinity of every node."""

from __future__ import annotations

import json
from dataclasses import dataclass

from placement.exporters import Exported, ExportError
from placement.exporters._onnx import node_devices, read_model, require_distinct
from placement.plan import Plan
from placement.problem import Problem


@dataclass(frozen=True)
class Openvino:
    """JSON ``{friendly name of a node: device}`` for ``rt_info["affinity"]``, complete.

    Format: "Heterogeneous execution" of OpenVINO's documentation, set manually; the JSON is what
    ``benchmark_app`` reads (openvinotoolkit/openvino#36396). One node of ONNX becomes several of
    OpenVINO: those without a counterpart, constants among them, are where their reader is, so
    that they can be folded. The file is read by OpenVINO for its names.

    Attributes:
        model: the ONNX file that the plan was made from.
        devices: what OpenVINO calls the plan's devices, as ``fast=GPU.0,cpu:0=CPU``. Devices of
            kind ``cpu``, ``gpu`` and ``npu`` need no entry.
    """

    model: str = ""
    devices: tuple[str, ...] = ()

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        proto = read_model(plan, self.model)
        if self.model.endswith(".gz"):
            raise ExportError(f"OpenVINO reads no compressed files: gunzip -k {self.model}")
        label = self.labels(plan)
        require_distinct(plan, label, "OpenVINO")
        try:
            import openvino
        except ImportError as error:
            raise ExportError("the names of nodes need OpenVINO: pip install openvino") from error
        of_tensor = {
            output: label[device]
            for node, device in zip(proto.graph.node, node_devices(plan, proto), strict=True)
            if device is not None
            for output in node.output
        }
        model = openvino.Core().read_model(self.model)
        affinity: dict[str, str] = {}
        for node in reversed(model.get_ordered_ops()):  # readers first
            mine = [of_tensor[x] for y in node.outputs() for x in y.get_names() if x in of_tensor]
            readers = [
                affinity[x.get_node().get_friendly_name()]
                for y in node.outputs()
                for x in y.get_target_inputs()
                if x.get_node().get_type_name() != "Result"
            ]
            if node.get_type_name() != "Result":
                affinity[node.get_friendly_name()] = (
                    mine or readers or [next(iter(label.values()))]
                )[0]
        for node in model.get_results():
            source = node.input_value(0).get_node().get_friendly_name()
            affinity[node.get_friendly_name()] = affinity[source]
        target = f"HETERO:{','.join(dict.fromkeys(affinity.values()))}"
        return Exported(
            {"": json.dumps(dict(reversed(affinity.items())), indent=1) + "\n"},
            f"set node.get_rt_info()['affinity'] of every node, and compile for {target}",
        )

    def labels(self, plan: Plan) -> dict[str, str]:
        """Name of each device in use -> what OpenVINO calls it."""
        named = dict(text.partition("=")[::2] for text in self.devices)
        kinds = {d.name: d.kind for d in plan.cluster.devices}
        strange = set(named) - set(kinds)
        if strange:
            raise ExportError(f"devices={','.join(self.devices)}: no device {min(strange)!r}")
        label = {}
        for name in dict.fromkeys(plan.assignment.values()):
            index = name.rpartition(":")[2]
            if name not in named and kinds[name] not in ("cpu", "gpu", "npu"):
                raise ExportError(
                    f"OpenVINO knows no device {name!r} of kind {kinds[name]!r}; if it does: "
                    f"devices={name}=GPU.0"
                )
            own = "CPU" if kinds[name] == "cpu" else kinds[name].upper()
            plain = own == "CPU" or not index.isdecimal()
            label[name] = named.get(name) or (own if plain else f"{own}.{index}")
        return label
