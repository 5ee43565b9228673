"""ONNX Runtime: an annotated model, and the session option that assigns annotations."""

from __future__ import annotations

import json
from dataclasses import dataclass

from placement.exporters import Exported, ExportError
from placement.exporters._modules import gpu_number
from placement.exporters._onnx import node_devices, read_model, require_distinct
from placement.plan import Plan
from placement.problem import Problem

OPTION = "session.layer_assignment_settings"


@dataclass(frozen=True)
class Onnxruntime:
    """The model with ``layer_ann`` on every node, and JSON of the session option beside it.

    Format: "Annotation-based layer assignment" of ONNX Runtime's documentation
    (microsoft/onnxruntime#27595): ``device(=annotation); ...``, where ``=`` is an exact match of
    the node's metadata ``layer_ann``; devices are ``cpu`` and ``gpu:INDEX``. One session has one
    execution provider of each kind, so a plan has at most one CPU device and one GPU.

    Attributes:
        model: the ONNX file that the plan was made from.
    """

    model: str = ""

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        model = read_model(plan, self.model)
        devices = list(dict.fromkeys(plan.assignment.values()))
        kinds = {d.name: d.kind for d in plan.cluster.devices}
        unknown = [d for d in devices if kinds[d] not in ("cpu", "cuda")]
        if unknown:
            raise ExportError(
                f"no execution provider is known for {unknown[0]!r} of kind {kinds[unknown[0]]!r}"
            )
        require_distinct(plan, kinds, "ONNX Runtime")
        for node, device in zip(model.graph.node, node_devices(plan, model), strict=True):
            others = [x for x in node.metadata_props if x.key != "layer_ann"]
            del node.metadata_props[:]
            node.metadata_props.extend(others)
            if device is not None:
                node.metadata_props.add(key="layer_ann", value=_annotation(devices, device))
        rules = [f"{_designator(d, kinds[d])}(={_annotation(devices, d)})" for d in devices]
        return Exported(
            {
                "": model.SerializeToString(),
                ".json": json.dumps({OPTION: "; ".join(rules)}, indent=1) + "\n",
            },
            "give the pairs of the .json to SessionOptions.add_session_config_entry; keep the "
            "model beside its external data, if it has some",
        )


def _annotation(devices: list[str], device: str) -> str:
    # By number: a device's name could hold what the grammar uses.
    return f"placement_{devices.index(device)}"


def _designator(name: str, kind: str) -> str:
    if kind == "cpu":
        return "cpu"
    number = gpu_number(name)
    if number is None:
        raise ExportError(
            f"ONNX Runtime knows GPUs by number: device {name[:60]!r} must be called cuda:0, "
            "cuda:1, ..."
        )
    return f"gpu:{number}"
