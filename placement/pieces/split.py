"""A graph in which chosen operators are cut into pieces: an ordinary graph, with its program."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from placement.graph import OpGraph
from placement.pieces.rules import (
    COPYING,
    SUM,
    SUMMED,
    WHOLE,
    Cut,
    Rule,
    Shares,
    Window,
    bounds,
    cut_tensor,
    is_mean,
    is_tensor,
    piece_leaves,
    target_of,
)
from placement.program import (
    Param,
    Program,
    Ref,
    Step,
    fill,
    leaves_of,
    mapped,
    signature,
    storage_of,
)

ONE = "one"  # how an operator that is not cut reads a tensor, and makes one
PADDING = "[padding]"  # ends the name of rows beside an image, which no module has
_aten = torch.ops.aten


class PiecesError(ValueError):
    """The graph cannot be cut as asked; the message has the operator and the numbers."""


@dataclass(frozen=True)
class Pieces:
    """What is cut.

    Attributes:
        shares: ``[k]`` of each piece, the same for all operators; they add up to 1.
        rules: by the operator's name.
        bounds: by the operator's name, ``[k + 1]`` where its pieces begin and end along what is
        cut.
            Where they are known, they are checked.
    """

    shares: Shares
    rules: Mapping[str, Rule]
    bounds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def cut_graph(graph: OpGraph, pieces: Pieces) -> OpGraph:
    """The graph with each of these operators as ``k``, and what moves between unlike cuts.

    A piece has a view of its part of a parameter. Tensors are put together, cut again or added up
    only where somebody reads them another way than they are made.

    Raises:
        PiecesError: no inference graph, an operator that is not there, or one that cannot be cut
        so.
    """
    check_can_be_cut(graph)
    unknown = sorted(set(pieces.rules) - set(graph.op_name))
    if unknown:
        raise PiecesError(f"graph {graph.name!r} has no operator {unknown[0]!r} to cut")
    return _Cutter(graph, pieces).graph()


def check_can_be_cut(graph: OpGraph) -> None:
    """Raises: PiecesError, a graph without a program, or a training step."""
    program = graph.program
    if not isinstance(program, Program):
        raise PiecesError(f"graph {graph.name!r} has no program to cut: capture the module")
    if graph.is_backward.any() or program.gradients or program.new_buffers:
        raise PiecesError(
            f"graph {graph.name!r} is a training step, which is not cut: leave --pieces out"
        )


class _Cutter:
    def __init__(self, graph: OpGraph, pieces: Pieces) -> None:
        self.old, self.program, self.pieces = graph, graph.program, pieces
        self.k = len(pieces.shares)
        self.steps: list[Step] = []
        self.name: list[str] = []
        self.module: list[str] = []
        self.label: list[Any] = []  # of its colocation group, before views join
        self.source: list[int] = []  # of each tensor
        self.value: list[Any] = []  # its shape and dtype, on the device meta
        self.params: list[Tensor] = list(self.program.params)
        self.param_names: list[str] = list(self.program.param_names)
        self.param_at: dict[Any, int] = {}
        self.meta: list[Tensor] = [_meta(x) for x in self.params]
        # How each tensor of the old graph is there: made first, then as whom it was asked for.
        self.there: list[dict[Cut, list[int]]] = [{} for _ in range(graph.num_tensors)]
        self.made: list[Cut] = [ONE] * graph.num_tensors
        self.bounds: dict[str, tuple[int, ...]] = {}

    def graph(self) -> OpGraph:
        old, program = self.old, self.program
        for t, example in zip(program.input_tensors, program.example_tensors, strict=True):
            self.there[t][ONE] = [self._tensor(-1, _meta(example))]
        for n in range(old.num_ops):
            rule = self.pieces.rules.get(old.op_name[n])
            if rule is None:
                self._whole(n)
            else:
                self._cut(n, rule)
        leaves = mapped(program.output_leaves, self._one)
        uses, param_uses = [], []
        for n, step in enumerate(self.steps):
            for leaf in leaves_of((step.args, step.kwargs)):
                if isinstance(leaf, Ref):
                    uses.append((leaf.tensor, n))
                elif isinstance(leaf, Param):
                    param_uses.append((n, leaf.index))
        root = self._roots()
        read = sorted(
            {p for _, p in param_uses} | {x.index for x in leaves if isinstance(x, Param)}
        )
        number = {p: i for i, p in enumerate(read)}

        def renumbered(x: Any) -> Any:
            return Param(number[x.index]) if isinstance(x, Param) else x

        cut = replace(
            program,
            steps=tuple(
                replace(x, args=mapped(x.args, renumbered), kwargs=mapped(x.kwargs, renumbered))
                for x in self.steps
            ),
            params=tuple(self.params[p] for p in read),
            param_names=tuple(self.param_names[p] for p in read),
            input_tensors=tuple(self.there[t][ONE][0] for t in program.input_tensors),
            output_leaves=mapped(leaves, renumbered),
            pieces=replace(self.pieces, bounds=self.bounds),
        )
        return OpGraph.build(
            old.name,
            self.name,
            self.source,
            [x.numel() * x.element_size() for x in self.value],
            uses,
            op_kind=[str(step.target) for step in self.steps],
            op_module=self.module,
            op_signature=[signature(x.target, x.args, x.kwargs, self._value) for x in self.steps],
            tensor_root=root,
            param_bytes=[x.numel() * x.element_size() for x in cut.params],
            param_uses=[(n, number[p]) for n, p in param_uses],
            group=self._groups(root),
            output_tensor=sorted({x.tensor for x in cut.output_leaves if isinstance(x, Ref)}),
            program=cut,
        )

    def _whole(self, n: int) -> None:
        step = self.program.steps[n]
        args, kwargs = mapped((step.args, step.kwargs), self._one)
        name = self.old.op_name[n]
        try:
            made = self._add(step.target, args, kwargs, n, name, step)
        except RuntimeError as error:
            if step.target not in COPYING:
                raise PiecesError(f"operator {name!r} cannot run behind pieces: {error}") from error
            made = self._add(COPYING[step.target], args, kwargs, n, name, step)
        for t, new in zip(step.outputs, made, strict=True):
            self.there[t][ONE] = [new]

    def _cut(self, n: int, rule: Rule) -> None:
        step, name = self.program.steps[n], self.old.op_name[n]
        divided = is_mean(step.target, rule)
        target = SUMMED[step.target] if divided else target_of(step.target)
        leaves, tree = pytree.tree_flatten((step.args, step.kwargs), is_leaf=_is_place)
        places = [x for x in leaves if is_tensor(x)]
        if (
            target is None
            or len(places) != len(rule.inputs)
            or len(step.outputs) != len(rule.outputs)
        ):
            raise PiecesError(
                f"operator {name!r} ({step.target}) cannot be cut as {rule}: it reads "
                f"{len(places)} tensors and makes {len(step.outputs)}"
            )
        self._check_numbers(name, rule, leaves)
        reads = [
            [Ref(t) for t in self._get(x.tensor, c)]
            if isinstance(x, Ref)
            else self._param(x.index, c)
            for x, c in zip(places, rule.inputs, strict=True)
        ]
        shares = self.pieces.shares
        each = piece_leaves(leaves, rule, shares, list(zip(*reads, strict=True)))
        made = []
        for i, own in enumerate(each):
            args, kwargs = pytree.tree_unflatten(own, tree)
            try:
                made.append(self._add(target, args, kwargs, n, f"{name}#{i}", step, i))
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                raise PiecesError(
                    f"piece {i} of operator {name!r} ({step.target}) cannot run: {error}"
                ) from error
        if divided:
            many = sum(self._value(x).numel() for x in reads[0]) // self.value[made[0][0]].numel()
            made = [
                [self._move(_aten.div.Scalar, (Ref(x), many), f"{name}.mean#{i}", self.module[-1])]
                for i, (x,) in enumerate(made)
            ]
        for o, (t, c) in enumerate(zip(step.outputs, rule.outputs, strict=True)):
            self.made[t] = c
            self.there[t][c] = [row[o] for row in made]
            self._check_cover(t, c, name)
        self._note_bounds(name, step, rule, reads)

    def _check_numbers(self, name: str, rule: Rule, leaves: Sequence[Any]) -> None:
        """Whether there are these dimensions of what is read, and numbers that are to shrink."""
        places = [x for x in leaves if is_tensor(x)]
        for x, cut in zip(places, rule.inputs, strict=True):
            one = x if isinstance(x, Param) else Ref(next(iter(self.there[x.tensor].values()))[0])
            _check_dim(name, cut, self._value(one))
        for i in (*rule.numbers, *rule.zeros):
            if i >= len(leaves) or type(leaves[i]) is not int:
                raise PiecesError(
                    f"argument {i} of operator {name!r}, which has {len(leaves)}, is to be another "
                    "number in its pieces, and is none"
                )

    def _check_cover(self, t: int, cut: Cut, name: str) -> None:
        values = [self.value[x] for x in self.there[t][cut]]
        _check_dim(name, cut, values[0])
        size = sum(x.nbytes for x in values) if isinstance(cut, int) else values[0].nbytes
        if size != self.old.tensor_bytes[t]:
            raise PiecesError(
                f"the pieces of operator {name!r} have {size:,} bytes of a result of "
                f"{int(self.old.tensor_bytes[t]):,}: they do not cover it"
            )

    def _note_bounds(self, name: str, step: Step, rule: Rule, reads: Sequence[Any]) -> None:
        """Where its pieces begin and end: along a result, or along an input where those are
        sums."""
        made = [
            [Ref(x) for x in self.there[t][c]]
            for t, c in zip(step.outputs, rule.outputs, strict=True)
        ]
        each = zip([*made, *reads], (*rule.outputs, *rule.inputs), strict=True)
        sizes = next(
            ([self._value(x).shape[c] for x in row] for row, c in each if isinstance(c, int)), []
        )
        bounds = (0, *itertools.accumulate(sizes)) if sizes else ()  # summands have none
        told = self.pieces.bounds.get(name, bounds)
        if told != bounds:
            raise PiecesError(
                f"operator {name!r} has {bounds[-1] if bounds else 0} elements along what is cut, "
                f"in pieces at {list(bounds)}, not at {list(told)}"
            )
        self.bounds[name] = bounds

    def _one(self, x: Any) -> Any:
        return Ref(self._get(x.tensor, ONE)[0]) if isinstance(x, Ref) else x

    def _value(self, x: Any) -> Any:
        return fill(x, self.value, self.meta)

    def _get(self, t: int, cut: Cut) -> list[int]:
        """The tensors that are ``t`` cut so: one, or one for each piece."""
        there = self.there[t]
        if cut not in there:
            there[cut] = self._moved(t, self.made[t], cut)
        return there[cut]

    def _moved(self, t: int, made: Cut, cut: Cut) -> list[int]:
        own = self.there[t][made]
        src = int(self.old.tensor_src[t])
        name = self.old.op_name[src] if src >= 0 else f"input{t}"
        module = self.old.op_module[src] if src >= 0 else ""
        if cut == SUM and made != SUM:
            raise PiecesError(f"a tensor of {name!r} is no sum, but is to be read as summands")
        if isinstance(cut, Window):
            whole = made in (ONE, WHOLE)
            own = own[:1] if whole else self._get(t, cut.dim)
            of = -1 if whole and src >= 0 else None
            return self._windows(t, own, cut, f"{name}.{t}", of, module)
        if made in (ONE, WHOLE):
            if cut in (ONE, WHOLE):
                return own[:1] if cut == ONE else [own[0]] * self.k
            return self._slices(own[0], cut, f"{name}.{t}", -1 if src >= 0 else None, module)
        if cut not in (ONE, WHOLE):  # made in other pieces
            rows = [self._slices(x, cut, f"{name}.{t}", i, module) for i, x in enumerate(own)]
            parts = list(zip(*rows, strict=True))
        else:
            parts = [tuple(own)] * (1 if cut == ONE else self.k)
        what = "" if cut in (ONE, WHOLE) else str(cut)
        return [
            self._joined(p, made, (f"{name}.{t}", f"{what}#{i}" if cut != ONE else ""), module)
            for i, p in enumerate(parts)
        ]

    def _slices(self, t: int, cut: Cut, name: str, of: int | None, module: str) -> list[int]:
        """Views of a tensor: of piece ``of``, -1 of a whole operator; None of an input of the
        model.

        They are named after the piece whose memory they see; views of an input are free.
        """
        assert isinstance(cut, int)
        at = bounds(self.value[t].shape[cut], self.pieces.shares)
        made = []
        for i in range(self.k):
            end = "" if of == -1 else f"#{i if of is None else of}"
            args = (Ref(t), cut, at[i], at[i + 1])
            made.append(self._move(_aten.slice.Tensor, args, f"{name}.cut{cut}.{i}{end}", module))
        return made

    def _windows(
        self, t: int, own: list[int], cut: Window, name: str, of: int | None, module: str
    ) -> list[int]:
        """What is read of a tensor that is there as a whole, or in pieces along its dimension."""
        at = (0, *itertools.accumulate(self.value[x].shape[cut.dim] for x in own))
        rows = cut.rows(at[-1], self.pieces.shares)
        each: list[list[Any]] = []
        for i, (begin, end) in enumerate(rows):  # what is sent comes before what waits for it
            parts: list[Any] = []
            for j, x in enumerate(own):
                a, b = max(begin, at[j]) - at[j], min(end, at[j + 1]) - at[j]
                if (a, b) == (0, at[j + 1] - at[j]):
                    parts.append(Ref(x))
                elif a < b:  # named after the piece whose memory it sees
                    sees = {-1: "", None: f"#{i}"}[of] if len(own) == 1 else f"#{j}"
                    args = (Ref(x), cut.dim, a, b)
                    view = f"{name}.rows{begin}.{i}.{j}{sees}"
                    parts.append(Ref(self._move(_aten.slice.Tensor, args, view, module)))
            if not parts:
                raise PiecesError(
                    f"{name!r} has {at[-1]} rows: {cut} would be those from {begin} to {end}"
                )
            each.append(parts)
        made = []
        for i, ((begin, end), parts) in enumerate(zip(rows, each, strict=True)):
            if begin < 0:
                parts.insert(0, self._padding(t, parts[0].tensor, cut, -begin))
            if end > at[-1]:
                parts.append(self._padding(t, parts[-1].tensor, cut, end - at[-1]))
            joined = f"{name}.window{begin}.{end}#{i}"
            made.append(
                self._move(_aten.cat.default, (parts, cut.dim), joined, module)
                if len(parts) > 1
                else parts[0].tensor
            )
        return made

    def _padding(self, t: int, like: int, cut: Window, rows: int) -> Param:
        x = self.value[like]
        key = "padding", x.dtype, *x.shape[: cut.dim], rows, *x.shape[cut.dim + 1 :], cut.least
        if key not in self.param_at:
            value = cut.padding(x.shape, rows).to(x.dtype)
            if value.ndim == 4:  # put together with images it has their layout, whichever that is
                value = value.contiguous(memory_format=torch.channels_last)
            self.param_at[key] = self._new_param(value, f"{t}{PADDING}")
        return Param(self.param_at[key])

    def _new_param(self, value: Tensor, name: str) -> int:
        self.params.append(value)
        self.meta.append(_meta(value))
        self.param_names.append(name)
        return len(self.params) - 1

    def _joined(self, parts: Sequence[int], made: Cut, name: tuple[str, str], module: str) -> int:
        begin, end = name
        if made != SUM:
            args = ([Ref(t) for t in parts], made)
            return self._move(_aten.cat.default, args, f"{begin}.cat{end}", module)
        total = parts[0]
        for i, t in enumerate(parts[1:]):
            total = self._move(
                _aten.add.Tensor, (Ref(total), Ref(t)), f"{begin}.add{i}{end}", module
            )
        return total

    def _move(self, target: Any, args: tuple[Any, ...], name: str, module: str) -> int:
        value = target(*fill(args, self.value, self.meta))
        self.steps.append(Step(target, args, {}, (len(self.source),), False, (0,)))
        self.name.append(name)
        self.module.append(module)
        self.label.append(name)
        return self._tensor(len(self.steps) - 1, value)

    def _add(
        self, target: Any, args: Any, kwargs: Any, n: int, name: str, step: Step, piece: int = -1
    ) -> list[int]:
        with torch.no_grad():
            own_args, own_kwargs = fill((args, kwargs), self.value, self.meta, torch.device("meta"))
            value = target(*own_args, **own_kwargs)
        values = [value[i] for i in step.output_index] if step.multi else [value]
        src = len(self.steps)
        made = [self._tensor(src, x) for x in values[: len(step.outputs)]]
        self.steps.append(Step(target, args, kwargs, tuple(made), step.multi, step.output_index))
        self.name.append(name)
        self.module.append(self.old.op_module[n])
        self.label.append((int(self.old.group[n]), piece))
        return made

    def _tensor(self, src: int, value: Tensor) -> int:
        self.source.append(src)
        self.value.append(value)
        return len(self.source) - 1

    def _param(self, p: int, cut: Cut) -> list[Param]:
        """Views of a parameter; of a bias that is added to summands, zeros for all but the
        first."""
        if cut == WHOLE:
            return [Param(p)] * self.k
        found = []
        for i in range(self.k):
            if cut == SUM and i == 0:
                found.append(Param(p))
                continue
            key = (p, cut, i)
            if key not in self.param_at:
                with torch.no_grad():
                    value = cut_tensor(self.params[p], cut, self.pieces.shares)[i]
                self.param_at[key] = self._new_param(value, f"{self.param_names[p]}[{cut}:{i}]")
            found.append(Param(self.param_at[key]))
        return found

    def _roots(self) -> list[int]:
        first: dict[int, int] = {}
        return [first.setdefault(storage_of(x), t) for t, x in enumerate(self.value)]

    def _groups(self, root: Sequence[int]) -> list[int]:
        """Labels of colocation groups: as in the old graph, piece by piece, and views beside
        memory."""
        number: dict[Any, int] = {}
        group = [number.setdefault(x, len(number)) for x in self.label]
        for t, r in enumerate(root):
            a, b = self.source[t], self.source[r]
            if a >= 0 and b >= 0 and group[a] != group[b]:
                old, new = group[a], group[b]
                group = [new if g == old else g for g in group]
        return group


def _check_dim(name: str, cut: Cut, x: Tensor) -> None:
    dim = cut.dim if isinstance(cut, Window) else cut
    if isinstance(dim, int) and dim >= x.ndim:
        raise PiecesError(
            f"operator {name!r} is to be cut along dimension {dim} of a tensor with {x.ndim}"
        )


def _is_place(x: Any) -> bool:
    return isinstance(x, Ref | Param)


def _meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
