"""Rows of embeddings that are read often, apart from the others: two tables and a sum.

The hot table has a row of zeros, which stands for all rows that are not hot, so that shapes do not
depend on what is looked up. The other one is the whole table, where hot rows are left out
(``cold_rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from placement.graph import OpGraph
from placement.pieces.split import ONE, Pieces, PiecesError, _Cutter, check_can_be_cut
from placement.program import Param, Program, Ref, Step, mapped, run_program, split_item

Counts = Mapping[str, NDArray[np.number[Any]]]
_aten = torch.ops.aten
_BAGS = (_aten.embedding_bag.padding_idx, _aten.embedding_bag.default)
_SUM, _MEAN = 0, 1
_OFFSETS, _MODE, _WEIGHTS, _ALL_OFFSETS, _PADDING = 2, 4, 6, 7, 8  # arguments of a bag


torch.library.define(
    "placement::cold_rows",
    "(Tensor table, Tensor cold, Tensor ids, Tensor? offsets, bool mean, bool all_offsets)"
    " -> Tensor",
)


@torch.library.impl("placement::cold_rows", "CompositeExplicitAutograd")
def cold_rows(
    table: Tensor, cold: Tensor, ids: Tensor, offsets: Tensor | None, mean: bool, all_offsets: bool
) -> Tensor:
    """Lookups of the cold rows of a table; hot ones count as zeros, and cost a comparison.

    Args:
        table: ``[rows, dim]``.
        cold: bool ``[rows]``: it is small, and stays in the cache.
        ids: of rows.
        offsets: where bags begin among the ids, ``[bags]``, with ``all_offsets`` also where the
            last ends; None: no bags.
        mean: of each bag, over all of its ids; else the sum.

    Returns:
        ``[*ids.shape, dim]``, or ``[bags, dim]``.

    Raises:
        IndexError: a row that does not exist.
        ValueError: bags that do not follow each other, from the first id on.
    """
    flat, count = ids.flatten(), ids.numel()
    if offsets is None:
        begins = torch.arange(count + 1, dtype=ids.dtype, device=ids.device)
    else:
        begins = offsets if all_offsets else F.pad(offsets, (0, 1), value=count)
    share, sizes = None, begins.diff()
    if ids.device.type == "cpu":
        from placement.pieces.lookups import keep  # compiled, so later

        if count and not 0 <= (ends := flat.aminmax()).min <= ends.max < len(cold):
            raise IndexError(
                f"row {int(ends.min)} or {int(ends.max)} of {len(cold)} does not exist"
            )
        if offsets is not None:
            follow = len(begins) and begins[0] == 0 and bool((sizes >= 0).all())
            if not (follow and begins[-1] <= count):
                raise ValueError(
                    f"bags begin at {offsets.tolist()} of {count} ids: must be 0 first, and then "
                    "not decrease, up to their number"
                )
        # One more than there are: what is not kept is written over.
        flat, kept, begins = flat.contiguous(), flat.new_empty(count + 1), begins.contiguous()
        kept_begins = torch.empty_like(begins)
        keep(*(x.numpy() for x in (cold, flat, begins, kept, kept_begins)))
        flat, begins = kept[: int(kept_begins[-1])], kept_begins
    else:  # how many are kept is not known there: all are read, hot ones count as zeros
        share = cold[flat].to(table.dtype)
    total = F.embedding_bag(
        flat,
        table,
        begins.to(ids.dtype),
        mode="sum",
        per_sample_weights=share,
        include_last_offset=True,
    )
    total = total / sizes.clamp(min=1).unsqueeze(1) if mean else total
    return total if offsets is not None else total.view(*ids.shape, table.shape[1])


@torch.library.register_fake("placement::cold_rows")
def _(
    table: Tensor, cold: Tensor, ids: Tensor, offsets: Tensor | None, mean: bool, all_offsets: bool
) -> Tensor:
    shape = ids.shape if offsets is None else (len(offsets) - all_offsets,)
    return table.new_empty(*shape, table.shape[1])


def row_counts(graph: OpGraph, batches: Iterable[Any]) -> dict[str, NDArray[np.int64]]:
    """How often each row of each embedding is looked up, by the parameter's name: int64 ``[rows]``.

    Args:
        graph: of an inference, with its program.
        batches: inputs, each as the graph's example: of a loader.

    Raises:
        PiecesError: a training step, or no program.
        InputError, CaptureError: inputs of another form.
    """
    check_can_be_cut(graph)
    program: Program = graph.program
    tables = {n: program.steps[n].args for n in _tables(program)}
    counts = {
        program.param_names[args[0].index]: np.zeros(len(program.params[args[0].index]), np.int64)
        for args in tables.values()
    }

    def count(tensor: int, value: Tensor) -> None:
        for table, ids, *_ in tables.values():
            if ids.tensor == tensor:
                own = counts[program.param_names[table.index]]
                own += np.bincount(value.flatten().numpy(force=True), minlength=len(own))

    for batch in batches:
        values = program.flatten_inputs(*split_item(batch))
        for tensor, value in zip(program.input_tensors, values, strict=True):
            count(tensor, value)
        run_program(program, values, count)
    return counts


def hot_rows(graph: OpGraph, counts: Counts, hot_bytes: int) -> OpGraph:
    """The graph with the hot rows of its embeddings as ``NAME#0``, the others as ``NAME#1``.

    An ordinary graph, whose operators planners place: hot rows on a GPU that has no memory for all
    of them, the whole table, where hot rows are left out, on a processor. Hot rows are copied: of a
    parameter that is written later, make the graph again. ``embedding`` gives the same numbers; of
    ``embedding_bag`` sums, and means, are in another order. A bag that takes the largest, weighs
    rows, or leaves an index out stays whole.

    Args:
        graph: of an inference, with its program.
        counts: by the name of an embedding's parameter, how often each row is read, ``[rows]``; of
            a parameter that is not named no row is hot. See ``row_counts``.
        hot_bytes: of hot rows, of all tables together: a fractional knapsack by reads per byte.

    Raises:
        PiecesError: a training step, no such embedding, counts of another number of rows, or
            negative ones.
    """
    check_can_be_cut(graph)
    program: Program = graph.program
    names = {program.param_names[program.steps[n].args[0].index] for n in _tables(program)}
    if unknown := sorted(set(counts) - names):
        raise PiecesError(
            f"{graph.name!r} has no embedding {unknown[0]!r} that can be cut; it has "
            f"{', '.join(sorted(names)) or 'none'}"
        )
    cutter = _Rows(graph, Pieces((1.0,), {}), _hottest(program, counts, hot_bytes))
    parted = cutter.graph()
    return replace(parted, program=replace(parted.program, pieces=program.pieces))


def _tables(program: Program) -> list[int]:
    """Numbers of the operators that look rows of a parameter up, and add nothing but them up."""
    return [
        n
        for n, step in enumerate(program.steps)
        if (step.target == _aten.embedding.default or (step.target in _BAGS and _is_linear(step)))
        and isinstance(step.args[0], Param)
        and isinstance(step.args[1], Ref)
    ]


def _is_linear(step: Step) -> bool:
    mode = step.args[_MODE] if len(step.args) > _MODE else _SUM
    padding = step.args[_PADDING] if len(step.args) > _PADDING else None
    weights = step.args[_WEIGHTS] if len(step.args) > _WEIGHTS else None
    return mode in (_SUM, _MEAN) and padding in (None, -1) and not step.kwargs and weights is None


def _hottest(program: Program, counts: Counts, hot_bytes: int) -> dict[int, NDArray[np.bool_]]:
    """By parameter bool ``[rows]``; of those that have both hot rows and others."""
    number = {name: p for p, name in enumerate(program.param_names)}
    per_byte, sizes, ends = [], [], []
    for name, some in counts.items():
        table = program.params[number[name]]
        if some.shape != (len(table),):
            raise PiecesError(
                f"{name!r} has {len(table)} rows: counts are of shape {list(some.shape)}"
            )
        if not (np.isfinite(some).all() and some.min(initial=0) >= 0):
            raise PiecesError(f"counts of {name!r} are not all at least 0: {some.min()}")
        size = table[0].numel() * table.element_size()
        per_byte.append(some / size)
        sizes.append(np.full(len(table), size))
        ends.append(len(table))
    if not sizes:
        return {}
    heat = np.concatenate(per_byte)
    order = np.argsort(-heat, kind="stable")
    order = order[heat[order] > 0]
    hot = np.zeros(len(heat), bool)
    hot[order[np.cumsum(np.concatenate(sizes)[order]) <= hot_bytes]] = True
    masks = np.split(hot, np.cumsum(ends)[:-1])
    pairs = zip((number[name] for name in counts), masks, strict=True)
    return {p: mask for p, mask in pairs if mask.any() and not mask.all()}


class _Rows(_Cutter):
    """A graph in which lookups of these parameters are two."""

    def __init__(
        self, graph: OpGraph, pieces: Pieces, hot: Mapping[int, NDArray[np.bool_]]
    ) -> None:
        super().__init__(graph, pieces)
        self.hot = hot
        self.lookups = set(_tables(self.program))

    def _whole(self, n: int) -> None:
        step, name = self.program.steps[n], self.old.op_name[n]
        mask = self.hot.get(step.args[0].index) if n in self.lookups else None
        if mask is None:
            super()._whole(n)
            return
        table, ids, *rest = mapped(step.args, self._one)
        module, dtype = self.old.op_module[n], self.value[ids.tensor].dtype
        rows, at = self._hot(table.index, mask, dtype)
        which = ids
        if dtype != torch.int64:  # ``take`` has no other
            long = self._move(_aten.to.dtype, (ids, torch.int64), f"{name}.ids#0", module)
            which = Ref(long)
            self.label[-1] = (int(self.old.group[n]), 0)
        moved = self._move(_aten.take.default, (at, which), f"{name}.rows#0", module)
        self.label[-1] = (int(self.old.group[n]), 0)  # beside its table
        args = (rows, Ref(moved), *rest)
        found = self._add(step.target, args, step.kwargs, n, f"{name}#0", step, 0)
        bags = step.target in _BAGS
        args = (
            table,
            self._kept(f"{self.param_names[table.index]}[cold]", lambda: torch.from_numpy(~mask)),
            ids,
            rest[_OFFSETS - 2] if bags else None,
            bags and len(step.args) > _MODE and step.args[_MODE] == _MEAN,
            bags and len(step.args) > _ALL_OFFSETS and step.args[_ALL_OFFSETS],
        )
        one = replace(step, multi=False, output_index=(0,))
        found += self._add(torch.ops.placement.cold_rows.default, args, {}, n, f"{name}#1", one, 1)
        both = (Ref(found[0]), Ref(found[1]))
        self.there[step.outputs[0]] = {
            ONE: [self._move(_aten.add.Tensor, both, f"{name}.add", module)]
        }

    def _hot(self, p: int, mask: NDArray[np.bool_], dtype: torch.dtype) -> tuple[Param, Param]:
        """The hot rows and zeros behind them; and where each row of the whole table is."""
        table, name, size = self.params[p].detach(), self.param_names[p], int(mask.sum())

        def rows() -> Tensor:
            own = table[torch.from_numpy(mask).to(table.device)]
            return torch.cat([own, table.new_zeros(1, table.shape[1])])

        def places() -> Tensor:
            at = torch.full((len(mask),), size, dtype=dtype)
            at[torch.from_numpy(mask)] = torch.arange(size, dtype=dtype)
            return at

        return self._kept(f"{name}[hot]", rows), self._kept(f"{name}[at:{dtype}]", places)

    def _kept(self, name: str, made: Callable[[], Tensor]) -> Param:
        """A parameter of its own, once."""
        if name not in self.param_at:
            self.param_at[name] = self._new_param(made(), name)
        return Param(self.param_at[name])
