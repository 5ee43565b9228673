"""The ONNX file that a plan is about, and devices that a runtime takes for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from placement.exporters import ExportError, Inexpressible, require_one_phase, require_whole
from placement.importers.onnx_model import node_names
from placement.plan import Plan
from placement.tools.files import read_file
from placement.tools.ownership import needing


def read_model(plan: Plan, path: str) -> Any:
    """The ``ModelProto`` (external data stays where it is) that the plan was made from.

    Raises:
        ExportError: no such file, no ONNX, or another model; or the plan has phases.
    """
    require_one_phase(plan)
    require_whole(plan)
    if not path:
        raise ExportError(
            "name the ONNX file that the plan was made from: model=model.onnx"
            if plan.graph.input_spec is None
            else "the plan is of a module, whose operators are not those of an ONNX file: write "
            "one (torch.onnx.export), and plan that: placement plan model.onnx --out plan.json"
        )
    with needing("onnx", f"{path}: ONNX files need the package onnx", ExportError):
        from onnx import inliner, load_model_from_string
    try:
        model: Any = load_model_from_string(read_file(path))
        if model.functions:  # as the importer does: operators are those inside
            model = inliner.inline_local_functions(model)
    except Exception as error:  # protobuf and the inliner raise their own kinds
        raise ExportError(f"{path}: cannot be read as an ONNX file: {error}") from error
    missing = set(plan.assignment) - {*node_names(model.graph.node)}
    if missing:
        raise ExportError(
            f"{path}: the plan of {plan.graph.name!r} is about another model: "
            f"{len(missing)} of its {plan.graph.num_ops} operators are not there, "
            f"e.g. {min(missing)!r}"
        )
    return model


def node_devices(plan: Plan, model: Any) -> list[str | None]:
    """Device of each node; None for constants, which are with their readers."""
    return [plan.assignment.get(name) for name in node_names(model.graph.node)]


def require_distinct(plan: Plan, label: Mapping[str, str], consumer: str) -> None:
    """Check that devices in use are told apart by what the consumer calls them.

    Raises:
        Inexpressible: two have one label; ``nearest`` has all on the one with most operators.
    """
    count = Counter(plan.assignment.values())
    first: dict[str, str] = {}
    for device, _ in count.most_common():
        first.setdefault(label[device], device)
    merged = {op: first[label[device]] for op, device in plan.assignment.items()}
    moved = [op for op in merged if merged[op] != plan.assignment[op]]
    if moved:
        was, now = plan.assignment[moved[0]], merged[moved[0]]
        more = f", and {len(moved) - 1} more operators" if len(moved) > 1 else ""
        raise Inexpressible(
            f"{consumer} cannot express this plan: {was!r} and {now!r} are one device "
            f"({label[now]}) to it; operator {moved[0]!r}{more} would move to {now!r}. "
            "--nearest exports the nearest plan it can express",
            merged,
        )
