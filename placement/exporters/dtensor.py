"""PyTorch's tensor parallelism: which modules are cut into columns, rows or tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from placement.exporters import Exported, ExportError, lacks, require_one_phase
from placement.exporters._modules import described, require_torch_devices, script
from placement.plan import Plan
from placement.plan.parts import CutInfo
from placement.problem import Problem

_PART = re.compile(r"(.*)\[(\w+):(\d+)\]", re.DOTALL)  # name of a piece of a parameter
_BY_TOKENS = ("linear", "layer_norm", "rms_norm", "mul")
_RANKS, _PLAN = "RANKS: list[dict[str, Any]] = []", "PLAN: dict[str, ParallelStyle] = {}"


@dataclass(frozen=True)
class Dtensor:
    """A Python module with the ``parallelize_plan`` of a plan with pieces, and what applies it.

    Format: ``torch.distributed.tensor.parallel.parallelize_module`` of torch 2.13. A linear layer
    or an embedding that is cut into columns is ``ColwiseParallel``, a linear layer cut along what
    it adds up ``RowwiseParallel``, a linear layer or a normalisation whose parameters every piece
    has ``SequenceParallel`` along what is cut. Pieces are equal, and one of each operator is on
    each device: a device is a rank. ``DTensor`` decides about all else. Modules hand on ``DTensor``
    (``use_local_output=False``), so that sizes in their code stay right.
    """

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        require_one_phase(plan)
        ranks = _ranks(plan)
        require_torch_devices(plan, ranks, as_ranks=True)
        styles = dict(sorted(_styles(plan).items()))
        if not styles:
            raise ExportError(
                f"no module of {plan.graph.name!r} has its parameters in pieces, or its tokens: "
                "there is nothing that parallelize_module could be told"
            )
        rows = "".join(f"    {path!r}: {style},\n" for path, style in styles.items())
        devices = "".join(f"    {row!r},\n" for row in described(plan, ranks))
        text = script("_dtensor.py")
        for empty, content in ((_RANKS, devices), (_PLAN, rows)):
            brackets = empty[-2:]
            text = text.replace(empty, f"{empty[:-1]}\n{content}{brackets[1]}")
        return Exported(
            {"": text},
            f"run: torchrun --nproc-per-node {len(ranks)} FILE package.module:function; in a "
            "program: parallelize(module); operators that are whole run on every rank",
        )


def _ranks(plan: Plan) -> list[str]:
    """The device of each piece.

    Raises:
        ExportError: no pieces, unequal ones, or pieces of one number on several devices.
    """
    if plan.pieces is None or not plan.pieces.operators:
        raise ExportError(
            f"the plan of {plan.graph.name!r} has no operators in pieces: plan with --pieces 2, or "
            "export with --to torch_pipelining"
        )
    shares, first = plan.pieces.shares, next(iter(plan.pieces.operators))
    if max(shares) - min(shares) > 1e-6:
        raise ExportError(
            f"DTensor cuts into equal pieces; those of {first!r} have the shares {list(shares)}"
        )
    ranks = [plan.assignment[f"{first}#{i}"] for i in range(len(shares))]
    for op in plan.pieces.operators:
        on = [plan.assignment[f"{op}#{i}"] for i in range(len(shares))]
        if on != ranks or len(set(on)) < len(on):
            raise ExportError(
                f"DTensor has one piece of each operator on each device; those of {op!r} are on "
                f"{on}, those of {first!r} on {ranks}. Plan with --planner round_robin for that"
            )
    return ranks


def _styles(plan: Plan) -> dict[str, str]:
    """Module path -> its style.

    Raises:
        ExportError: parameters in pieces that no style has; the message names the operator.
    """
    pieces = plan.pieces
    assert pieces is not None
    read = _parameters(plan)
    where = dict(zip(plan.assignment, plan.graph.modules, strict=True))
    if not any(where.values()):
        raise lacks(plan, "to which modules its operators belong")
    styles: dict[str, str] = {}
    by: dict[str, str] = {}
    for op, cut in pieces.operators.items():
        params = read.get(f"{op}#0", {})
        if not params:
            continue
        path, style = where[f"{op}#0"], _style(plan, op, cut, params)
        if style is None:
            continue
        own = all(name.rpartition(".")[0] == path for name in params)
        if not own or not path:
            raise ExportError(
                f"operator {op!r} of module {path!r} reads {min(params)!r}, and DTensor cuts "
                "parameters of the module that runs: make it a module of its own"
            )
        if styles.setdefault(path, style) != style:
            raise ExportError(
                f"module {path!r} is cut in two ways, {styles[path]} by {by[path]!r} and {style} "
                f"by {op!r}; DTensor has one for a module"
            )
        by[path] = op
    _check_others(read, where, styles, by)
    return styles


def _parameters(plan: Plan) -> dict[str, dict[str, str]]:
    """Operator -> which parameters it reads, and how they are cut: a dimension, sum or whole."""
    names = list(plan.assignment)
    read: dict[str, dict[str, str]] = {}
    for name, readers in plan.graph.parameters.items():
        part = _PART.fullmatch(name)
        base, how = (part[1], part[2]) if part else (name, "whole")
        for n in readers:
            read.setdefault(names[n], {})[base] = how
    return read


def _style(plan: Plan, op: str, cut: CutInfo, params: Mapping[str, str]) -> str | None:
    """Of the module of an operator; None: nothing need be said.

    Raises:
        ExportError: no style is that.
    """
    kind = re.sub(r"(_\d+)?$", "", op)
    # Buffers and constants stay whole.
    own = {name: how for name, how in params.items() if name.endswith(("weight", "bias"))}
    if all(how == "whole" for how in own.values()):
        along = [c for c in cut.inputs if type(c) is int]
        # Others may read another shape than their module, as Conv1D of GPT-2 does.
        by_tokens = own and along and kind in _BY_TOKENS
        return f"SequenceParallel(sequence_dim={along[0]})" if by_tokens else None
    weight = next((how for name, how in own.items() if name.endswith("weight")), "")
    columns = {"linear": "0", "embedding": "1"}
    if kind not in columns or weight not in (columns[kind], "1"):
        raise ExportError(
            f"operator {op!r} has its parameters in pieces ({', '.join(sorted(own))}), and PyTorch "
            "has styles for columns of linear layers and embeddings and for rows of linear layers"
        )
    if len(cut.bounds) < 2:
        raise ExportError(f"the plan does not say where the pieces of operator {op!r} begin")
    size, k = cut.bounds[-1], len(cut.bounds) - 1
    even = [min(size, i * ceil(size / k)) for i in range(k + 1)]
    if list(cut.bounds) != even:
        raise ExportError(
            f"operator {op!r} is cut at {list(cut.bounds)}, DTensor would cut it at {even}"
        )
    if weight == columns[kind]:
        return "ColwiseParallel(use_local_output=False)"
    again = next(_read_along(plan, op), None)
    layouts = "" if again is None else f"output_layouts=Shard({again}), "
    return f"RowwiseParallel({layouts}use_local_output=False)"


def _read_along(plan: Plan, op: str) -> Iterator[int]:
    """Dimensions along which the summands of an operator are cut before they are added up."""
    pattern = re.compile(rf"{re.escape(op)}\.\d+\.cut(\d+)\.")
    yield from (int(match[1]) for name in plan.assignment if (match := pattern.match(name)))


def _check_others(
    read: Mapping[str, Mapping[str, str]],
    where: Mapping[str, str],
    styles: Mapping[str, str],
    by: Mapping[str, str],
) -> None:
    """Raises: ExportError, what is cut is also read elsewhere, or by an operator that is whole."""
    cut = {path for path, style in styles.items() if not style.startswith("Sequence")}
    for op, params in read.items():
        for name, how in params.items():
            path = name.rpartition(".")[0]
            if path in cut and (where[op] != path or ("#" not in op and how == "whole")):
                raise ExportError(
                    f"operator {op!r} reads {name!r} whole, which {by[path]!r} has in pieces: "
                    "DTensor cuts a parameter for all of its readers"
                )
