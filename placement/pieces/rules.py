"""How an operator can be cut: found by running it on parts of its inputs and looking at what comes
out.

Evidence, not proof: floats are random, indices and masks are those of the example. A graph that was
cut is run against the whole one, too (``split``). More operators have a rule so than PyTorch's own
sharding strategies know.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from placement.program import signature
from placement.tools.files import FileError, cache_folder, parse_json, read_text, write_atomic

Shares = tuple[float, ...]
WHOLE, SUM = "whole", "sum"


class Window(NamedTuple):
    """Parts of a tensor that overlap: each has the rows that its part of a convolution reads.

    Attributes:
        dim: along which it is cut.
        span: rows that one row of the result depends on.
        stride: rows from one of these windows to the next.
        pad: rows that the tensor is continued by on either side, as parts at its ends are.
        least: whether these rows are as small as numbers can be (of a maximum), not 0.
    """

    dim: int
    span: int
    stride: int
    pad: int
    least: bool = False

    def rows(self, size: int, shares: Shares) -> list[tuple[int, int]]:
        """``[k]`` where each part begins and ends; before 0 and after ``size`` it is continued."""
        at = bounds((size + 2 * self.pad - self.span) // self.stride + 1, shares)
        return [
            (a * self.stride - self.pad, (b - 1) * self.stride + self.span - self.pad)
            for a, b in itertools.pairwise(at)
        ]

    def padding(self, shape: Sequence[int], rows: int) -> Tensor:
        """By what a tensor of this shape is continued."""
        shape = [*shape[: self.dim], rows, *shape[self.dim + 1 :]]
        return torch.full(shape, -torch.inf if self.least else 0.0)


# Of a tensor: along this dimension, not at all (each piece has it), in summands, or in windows.
Cut = int | str | Window

_aten = torch.ops.aten
# What was put together of pieces may lie in memory as no view can be taken of it.
COPYING = {
    _aten.view.default: _aten.reshape.default,
    _aten._unsafe_view.default: _aten.reshape.default,
}
# What its pieces are along what it averages: sums, each divided by the number of all elements.
SUMMED = {_aten.mean.dim: _aten.sum.dim_IntList}
# Operators that slide windows over rows of images (dimension 2), and what says which.
_SLIDING = (
    _aten.conv1d.default,
    _aten.conv2d.default,
    _aten.conv3d.default,
    _aten.convolution.default,
    _aten.max_pool2d.default,
)
_MOST_INPUTS = 6  # tensors, a list counting as one, that can be cut independently
_MOST_TRIES = 20_000  # ways to cut the inputs of an operator
_VERSION = 2  # to be raised with what finds other rules
_SMALL = 2.0**-60  # times numbers in summands: rounded alike, and below any constant
_ROUNDING = 1e-3  # of the largest value: sums in another order; a wrong piece is off by far more


@dataclass(frozen=True)
class Rule:
    """One way to cut an operator.

    Attributes:
        inputs: how each tensor among its arguments is cut, in the order of their leaves.
        numbers: which leaves of the arguments are sizes that shrink with the piece.
        outputs: how each of its graph tensors is cut then.
        zeros: which leaves of the arguments are 0 in a piece, as padding is part of a ``Window``.
    """

    inputs: tuple[Cut, ...]
    numbers: tuple[int, ...]
    outputs: tuple[Cut, ...]
    zeros: tuple[int, ...] = ()


def bounds(size: int, shares: Shares) -> tuple[int, ...]:
    """``[k + 1]`` where the pieces of a dimension begin and end."""
    return tuple(int(x) for x in np.rint(np.cumsum((0.0, *shares)) * size))


def sizes(size: int, shares: Shares) -> tuple[int, ...]:
    """``[k]`` elements of each piece of a dimension."""
    at = bounds(size, shares)
    return tuple(b - a for a, b in itertools.pairwise(at))


def target_of(target: Any) -> Any:
    """What a piece calls; None: the operator cannot be cut, as it writes where it is told to."""
    if target in COPYING:
        return COPYING[target]
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if not target._schema.is_mutable:
        return target
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(_aten, name.removesuffix("_"), None) if name.endswith("_") else None
    plain = getattr(packet, target._overloadname, None)
    if plain is None or plain._schema.is_mutable:
        return None
    return plain


def cut_tensor(x: Tensor, cut: Cut, shares: Shares) -> list[Tensor]:
    """The pieces of a tensor; views, but for summands: the first has all, the others are zeros."""
    if cut == WHOLE:
        return [x] * len(shares)
    if cut == SUM:
        return [x, *(torch.zeros_like(x) for _ in shares[1:])]
    if isinstance(cut, Window):
        size, fill = x.shape[cut.dim], -torch.inf if cut.least else 0.0
        pads = [(max(0, -a), max(0, b - size)) for a, b in cut.rows(size, shares)]
        after = [0, 0] * (x.ndim - cut.dim - 1)
        return [
            F.pad(
                x.narrow(cut.dim, max(a, 0), min(b, size) - max(a, 0)), [*after, *pad], value=fill
            )
            for (a, b), pad in zip(cut.rows(size, shares), pads, strict=True)
        ]
    assert isinstance(cut, int)
    return list(x.split(sizes(x.shape[cut], shares), cut))


def piece_leaves(
    leaves: Sequence[Any], rule: Rule, shares: Shares, tensors: Sequence[Any]
) -> list[Any]:
    """The leaves of the arguments of each piece; ``tensors [k][num tensors]`` are the tensors'."""
    pieces = []
    for i, own in enumerate(tensors):
        rest = iter(own)
        piece = [next(rest) if is_tensor(x) else x for x in leaves]
        for j in rule.numbers:
            piece[j] = sizes(leaves[j], shares)[i]
        for j in rule.zeros:
            piece[j] = 0
        pieces.append(piece)
    return pieces


def is_tensor(leaf: Any) -> bool:
    """Of a template too."""
    return isinstance(leaf, Tensor) or type(leaf).__name__ in ("Ref", "Param")


def known_rules(
    target: Any,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    is_param: Sequence[bool],
    outputs: Sequence[int] | None,
    shares: Shares,
) -> list[Rule]:
    """``rules_of``, which are kept: a call that is alike has the rules that were found before.

    Alike are shapes, dtypes, strides and constants, and the values of indices and masks, in the
    same version of PyTorch and of what finds rules.
    """
    args, kwargs = arguments
    tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
    values = [
        hashlib.blake2b(x.contiguous().numpy().tobytes()).hexdigest()
        for x in tensors
        if not x.is_floating_point()
    ]
    called = signature(target, args, kwargs, lambda x: x), [x.stride() for x in tensors]
    facts = _VERSION, torch.__version__, called, values, [*is_param], outputs, shares
    name = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
    path = cache_folder() / "rules" / f"{name}.json"
    with suppress(OSError, ValueError, TypeError):  # none is there, or it is damaged
        return [rule_of(*row) for row in parse_json(read_text(path))]
    rules = rules_of(target, arguments, is_param, outputs, shares)
    with suppress(FileError):  # found again next time
        write_atomic(path, json.dumps([astuple(rule) for rule in rules]))
    return rules


def rule_of(inputs: Any, *rest: Any) -> Rule:
    """From a file, where windows are lists."""
    cuts = tuple(Window(*cut) if isinstance(cut, list) else cut for cut in inputs)
    return Rule(cuts, *map(tuple, rest))


def rules_of(
    target: Any,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    is_param: Sequence[bool],
    outputs: Sequence[int] | None,
    shares: Shares,
) -> list[Rule]:
    """All ways to cut a call of ``target`` into pieces of these ``shares``.

    Args:
        arguments: ``(args, kwargs)`` with tensors of the real shapes and dtypes; integers and
            booleans with the real values.
        is_param: of each tensor among the leaves; only a parameter with one dimension, a bias, is
        cut
            into summands.
        outputs: which elements of what it returns are tensors of the graph; None: it returns one.
    """
    call = target_of(target)
    leaves, tree = pytree.tree_flatten(arguments)
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    if call is None or not at:
        return []
    exact = [_random(x, i) if isinstance(x, Tensor) else x for i, x in enumerate(leaves)]
    whole = _call(call, exact, tree, outputs)
    if whole is None or any(x.is_floating_point() and x.isnan().any() for x in whole):
        exact = [x.abs() + 0.1 if _is_float(x) else x for x in exact]
        whole = _call(call, exact, tree, outputs)
        if whole is None:
            return []
    again = _call(call, exact, tree, outputs)
    if again is None or not all(map(_equal, again, whole)):
        return []  # it draws random numbers
    shapes = [torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in exact]

    def made_of(
        rule: Rule, given: list[Any], whole: list[Tensor], cuts: Sequence[set[Cut]], scale: float
    ) -> tuple[Cut | None, ...]:
        """Which of these cuts of each output the pieces are; None: of none, or one fails."""
        parts = _run(call, given, at, tree, outputs, rule, shares, scale)
        if parts is None:
            return (None,)
        each = enumerate(cuts)
        return tuple(_which(whole[o], [p[o] for p in parts], options) for o, options in each)

    found: dict[Any, Rule] = {}
    probed = itertools.islice(_tries(leaves, at, is_param, arguments, shares), _MOST_TRIES)
    for rule in itertools.chain(_windows(call, arguments, len(at), shares), probed):
        cuts = _output_cuts(call, shapes, at, tree, outputs, rule, whole, shares)
        if cuts is None or all(c == {WHOLE} for c in cuts):
            continue
        made = made_of(rule, exact, whole, cuts, 1.0)
        if None not in made and any(m != WHOLE for m in made):
            if SUM in rule.inputs:
                # A small constant that each piece adds (of a norm, 1e-5) is not lost in rounding.
                small = [*exact]
                for i, cut in zip(at, rule.inputs, strict=True):
                    small[i] = exact[i] * _SMALL if cut == SUM else exact[i]
                own = _call(call, small, tree, outputs)
                same: list[set[Cut]] = [{m} for m in made if m is not None]
                if not own or made != made_of(rule, small, own, same, _SMALL):
                    continue
            found.setdefault((rule.inputs, made), replace(rule, outputs=made))  # type: ignore[arg-type]
    for rule in _tries(leaves, at, is_param, arguments, shares) if target in SUMMED else ():
        rule = replace(rule, outputs=(SUM,))
        parts = _run(SUMMED[target], exact, at, tree, outputs, rule, shares)
        # Along what is not averaged, pieces are parts of the result, maybe of unlike sizes.
        if parts and is_mean(target, rule) and all(x.shape == whole[0].shape for (x,) in parts):
            many = exact[at[0]].numel() / max(1, whole[0].numel())
            total = torch.stack([part for (part,) in parts]).sum(0)
            if _equal(total / many, whole[0]):
                found.setdefault((rule.inputs, rule.outputs), rule)
    return list(found.values())


def is_mean(target: Any, rule: Rule) -> bool:
    """Whether pieces of this operator are sums, which have to be divided."""
    return target in SUMMED and isinstance(rule.inputs[0], int) and rule.outputs == (SUM,)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _random(x: Tensor, seed: int) -> Tensor:
    if not x.is_floating_point():
        return x
    g = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=g)


def _tries(
    leaves: Sequence[Any],
    at: Sequence[int],
    is_param: Sequence[bool],
    arguments: Any,
    shares: Shares,
) -> Iterator[Rule]:
    """Ways to cut the inputs: fewer numbers first; tensors of one list all alike."""
    k = len(shares)
    together = _lists(arguments)
    ways: list[list[Cut]] = []
    for i, param in zip(at, is_param, strict=True):
        x = leaves[i]
        can: list[Cut] = [WHOLE]
        can += [d for d in range(x.ndim) if x.shape[d] >= k and min(sizes(x.shape[d], shares)) > 0]
        if x.is_floating_point() and not (param and x.ndim != 1):
            can.append(SUM)
        ways.append(can)
    free = [members[0] for members in together]
    if len(free) > _MOST_INPUTS:
        return
    numbers = [
        i for i, x in enumerate(leaves) if type(x) is int and x >= k and min(sizes(x, shares)) > 0
    ]
    chosen = [c for n in range(3) for c in itertools.combinations(numbers, n)]
    for own in itertools.product(*(ways[i] for i in free)):
        cuts: list[Cut] = [WHOLE] * len(at)
        for members, w in zip(together, own, strict=True):
            for m in members:
                cuts[m] = w
        if any(w not in ways[m] for m, w in enumerate(cuts)):
            continue
        if all(w == WHOLE or (is_param[m] and w == SUM) for m, w in enumerate(cuts)):
            continue  # every piece would do all the work
        for some in chosen:
            yield Rule(tuple(cuts), some, ())


def _windows(call: Any, arguments: Any, num_tensors: int, shares: Shares) -> Iterator[Rule]:
    """Rows of what a convolution or a maximum over windows makes, of the rows that they read."""
    args, kwargs = arguments
    names = [x.name for x in call._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    first = dict(zip(given, np.cumsum([0, *map(_num_leaves, given.values())]), strict=False))
    if call not in _SLIDING or given.get("transposed") or given.get("ceil_mode"):
        return
    x = given[names[0]]
    spans = given["weight"].shape[2:] if "weight" in given else given["kernel_size"]
    stride, *_ = given.get("stride") or (spans if "kernel_size" in given else [1])
    (pad, *rest), (dilation, *_) = given.get("padding") or [0], given.get("dilation") or [1]
    if x.ndim != 2 + len(spans) or (pad and 1 + len(rest) < len(spans)):
        return  # no batch, or one number for all dimensions
    window = Window(2, (spans[0] - 1) * dilation + 1, stride, pad, "weight" not in given)
    if x.shape[2] + 2 * pad >= window.span:
        inputs: tuple[Cut, ...] = (window, *[WHOLE] * (num_tensors - 1))
        yield Rule(inputs, (), (), (int(first["padding"]),) if pad else ())


def _num_leaves(x: Any) -> int:
    return len(pytree.tree_leaves(x))


def _lists(arguments: Any) -> list[list[int]]:
    """Numbers of the tensors among the leaves, those of one list together."""
    count = itertools.count()
    groups: list[list[int]] = []

    def walk(x: Any, into: list[int] | None) -> None:
        if isinstance(x, dict):
            for v in x.values():
                walk(v, None)
        elif isinstance(x, list | tuple):
            own: list[int] = []
            for v in x:
                walk(v, own)
            if own:
                groups.append(own)
        elif isinstance(x, Tensor):
            (into.append if into is not None else lambda i: groups.append([i]))(next(count))

    args, kwargs = arguments
    for x in (*args, *kwargs.values()):
        walk(x, None)
    return groups


def _call(call: Any, leaves: list[Any], tree: Any, outputs: Any) -> list[Tensor] | None:
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    try:
        with torch.no_grad():
            value = call(*args, **kwargs)
        values = [value] if outputs is None else [value[i] for i in outputs]
    except Exception:  # whatever an operator says of such inputs: it cannot be cut so
        return None
    return values if all(isinstance(x, Tensor) for x in values) else None


def _run(
    call: Any,
    leaves: list[Any],
    at: Sequence[int],
    tree: Any,
    outputs: Any,
    rule: Rule,
    shares: Shares,
    summands: float = 0.0,
) -> list[list[Tensor]] | None:
    """What each piece gives; None: one fails. Summands are random, of this size; 0: all but one
    are 0."""
    tensors = []
    for j, i in enumerate(at):
        x = leaves[i]
        if rule.inputs[j] == SUM and summands:
            parts = [summands * _random(x, 1000 + 10 * j + p) for p in range(len(shares) - 1)]
            tensors.append([*parts, x - sum(parts)])
        else:
            tensors.append(cut_tensor(x, rule.inputs[j], shares))
    given = piece_leaves(leaves, rule, shares, list(zip(*tensors, strict=True)))
    made = []
    for own in given:
        values = _call(call, own, tree, outputs)
        if values is None:
            return None
        made.append(values)
    return made


def _output_cuts(
    call: Any,
    shapes: list[Any],
    at: Sequence[int],
    tree: Any,
    outputs: Any,
    rule: Rule,
    whole: list[Tensor],
    shares: Shares,
) -> list[set[Cut]] | None:
    """How outputs may be cut, by the shapes of the pieces; None: in no way."""
    made = _run(call, shapes, at, tree, outputs, rule, shares)
    if made is None:
        return None
    cuts: list[set[Cut]] = []
    for o, x in enumerate(whole):
        shape = tuple(x.shape)
        options: set[Cut] = set()
        if all(tuple(p[o].shape) == shape for p in made):
            options = {WHOLE, SUM} if x.is_floating_point() else {WHOLE}
        else:
            for d in range(len(shape)):
                expected = [(*shape[:d], s, *shape[d + 1 :]) for s in sizes(shape[d], shares)]
                if [tuple(p[o].shape) for p in made] == expected:
                    options.add(d)
        if not options:
            return None
        cuts.append(options)
    return cuts


def _which(whole: Tensor, parts: list[Tensor], options: set[Cut]) -> Cut | None:
    for d in options - {WHOLE, SUM}:
        assert isinstance(d, int)
        if _equal(torch.cat(parts, d), whole):
            return d
    if WHOLE in options and all(_equal(p, whole) for p in parts):
        return WHOLE
    if SUM in options and _equal(sum(parts[1:], parts[0]), whole):
        return SUM
    return None


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    if not a.numel():
        return True
    return bool(((a - b).abs().max() <= _ROUNDING * b.abs().max()).item())
