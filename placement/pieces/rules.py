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
SUMMED = {_aten.mean.dim: _aten.sum.dim_IntList, _aten.mean.default: _aten.sum.default}
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
_VERSION = 3  # to be raised with what finds other rules
# Times numbers in summands: rounded alike, below any constant, and above any limit.
_SCALES = 2.0**-60, 2.0**20
_FEW = 4096  # numbers of a result: more are no chance, and say how large they are
_ROUNDING = 1e-3  # of a value: sums in another order; a wrong piece is off by far more


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
        hashlib.blake2b(x.resolve_conj().contiguous().numpy().tobytes()).hexdigest()
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
    probe = _Probe(call, tree, at, outputs, shares)
    exact, whole = probe.numbers(leaves)
    again = probe.made(exact) if whole else None
    if not whole or not again or not all(map(_equal, again, whole)):
        return []  # it cannot run, or draws random numbers
    others = probe.others(leaves, whole)
    shapes = [torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in exact]
    found: dict[Any, Rule] = {}
    probed = itertools.islice(_tries(leaves, at, is_param, arguments, shares), _MOST_TRIES)
    for rule in itertools.chain(_windows(call, arguments, len(at), shares), probed):
        cuts = probe.cuts(shapes, rule, whole)
        if cuts is None or all(c == {WHOLE} for c in cuts):
            continue
        made = probe.which(rule, exact, whole, cuts)
        if made and any(m != WHOLE for m in made) and probe.holds(rule, made, exact, others):
            found.setdefault((rule.inputs, made), replace(rule, outputs=made))
    if target in SUMMED:
        summed = replace(probe, target=SUMMED[target])
        for rule in _tries(leaves, at, is_param, arguments, shares):
            rule = replace(rule, outputs=(SUM,))
            if is_mean(target, rule) and all(
                summed.averages(rule, given, own) for given, (own,) in [(exact, whole), *others]
            ):
                found.setdefault((rule.inputs, rule.outputs), rule)
    return list(found.values())


def is_mean(target: Any, rule: Rule) -> bool:
    """Whether pieces of this operator are sums, which have to be divided."""
    return target in SUMMED and isinstance(rule.inputs[0], int) and rule.outputs == (SUM,)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _random(x: Tensor, seed: int) -> Tensor:
    """Floats that are others in each part of each dimension, as means of many would be alike."""
    if not x.is_floating_point():
        return x
    g = torch.Generator().manual_seed(seed)
    made = torch.randn(x.shape, generator=g)
    for d, size in enumerate(x.shape):
        if size > 1:
            made += torch.linspace(-1.0, 1.0, size).view(-1, *[1] * (x.ndim - d - 1))
    return made


@dataclass(frozen=True)
class _Probe:
    """Tries an operator on parts of its inputs.

    Attributes:
        target: what is called.
        tree: of its arguments, among whose leaves ``at`` are the tensors.
        outputs: which elements of what it returns count; None: it returns one tensor.
    """

    target: Any
    tree: Any
    at: Sequence[int]
    outputs: Sequence[int] | None
    shares: Shares

    def made(self, leaves: Sequence[Any]) -> list[Tensor] | None:
        """What it returns; None: it fails."""
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        try:
            with torch.no_grad():
                value = self.target(*args, **kwargs)
            values = [value] if self.outputs is None else [value[i] for i in self.outputs]
        except Exception:  # whatever an operator says of such inputs: it cannot be cut so
            return None
        return values if all(isinstance(x, Tensor) for x in values) else None

    def numbers(
        self, leaves: Sequence[Any], seed: int = 0
    ) -> tuple[list[Any], list[Tensor] | None]:
        """The leaves with random floats, and what it returns; None: it fails, or gives no
        numbers."""
        given = [_random(x, seed + i) if isinstance(x, Tensor) else x for i, x in enumerate(leaves)]
        made = self.made(given)
        if made is None or any(map(_has_nan, made)):
            given = [x.abs() + 0.1 if _is_float(x) else x for x in given]
            made = self.made(given)
        return given, None if made is None or any(map(_has_nan, made)) else made

    def others(
        self, leaves: Sequence[Any], whole: Sequence[Tensor]
    ) -> list[tuple[list[Any], list[Tensor]]]:
        """More leaves, and what it returns: no rule holds by chance, or for one mask.

        With another mask and other indices where these can be, and else as they are.
        """
        found = []
        for seed in range(2000, 3000 if sum(x.numel() for x in whole) < _FEW else 2100, 100):
            g = torch.Generator().manual_seed(seed)
            masks = [_other_mask(x, g) for x in leaves]
            for values in ([_other_indices(x, g) for x in masks], masks, leaves):
                given, made = self.numbers(values, seed)
                if made and [x.shape for x in made] == [x.shape for x in whole]:
                    found.append((given, made))
                    break
        return found

    def parts(
        self, leaves: Sequence[Any], rule: Rule, summands: float = 0.0
    ) -> list[list[Tensor]] | None:
        """What each piece returns; None: one fails. Summands are random, of this size; 0: all but
        one are 0."""
        tensors = []
        for j, i in enumerate(self.at):
            x = leaves[i]
            if rule.inputs[j] == SUM and summands:
                seeds = range(1000 + 10 * j, 1000 + 10 * j + len(self.shares) - 1)
                parts = [summands * _random(x, seed) for seed in seeds]
                tensors.append([*parts, x - sum(parts)])
            else:
                tensors.append(cut_tensor(x, rule.inputs[j], self.shares))
        given = piece_leaves(leaves, rule, self.shares, list(zip(*tensors, strict=True)))
        made = []
        for own in given:
            values = self.made(own)
            if values is None:
                return None
            made.append(values)
        return made

    def cuts(
        self, shapes: Sequence[Any], rule: Rule, whole: Sequence[Tensor]
    ) -> list[set[Cut]] | None:
        """How outputs may be cut, by the shapes of the pieces; None: in no way."""
        made = self.parts(shapes, rule)
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
                    expected = [
                        (*shape[:d], s, *shape[d + 1 :]) for s in sizes(shape[d], self.shares)
                    ]
                    if [tuple(p[o].shape) for p in made] == expected:
                        options.add(d)
            if not options:
                return None
            cuts.append(options)
        return cuts

    def which(
        self,
        rule: Rule,
        leaves: Sequence[Any],
        whole: Sequence[Tensor],
        cuts: Sequence[set[Cut]],
        scale: float = 1.0,
    ) -> tuple[Cut, ...]:
        """Which of its ``cuts`` each output has; empty: one has none, or a piece fails."""
        parts = self.parts(leaves, rule, scale)
        if parts is None:
            return ()
        made = [_which(x, [p[o] for p in parts], cuts[o]) for o, x in enumerate(whole)]
        return () if None in made else tuple(m for m in made if m is not None)

    def holds(
        self,
        rule: Rule,
        made: tuple[Cut, ...],
        exact: Sequence[Any],
        others: Sequence[tuple[list[Any], list[Tensor]]],
    ) -> bool:
        """Whether outputs are ``made`` so of other numbers, too."""
        same: list[set[Cut]] = [{m} for m in made]
        if any(self.which(rule, given, whole, same) != made for given, whole in others):
            return False
        # Of summands, a constant that each adds (of a norm, 1e-5) is not lost in rounding, and a
        # limit is passed.
        for scale in _SCALES if SUM in rule.inputs else ():
            scaled = [*exact]
            for i, cut in zip(self.at, rule.inputs, strict=True):
                scaled[i] = exact[i] * scale if cut == SUM else exact[i]
            whole = self.made(scaled)
            if not whole or self.which(rule, scaled, whole, same, scale) != made:
                return False
        return True

    def averages(self, rule: Rule, leaves: Sequence[Any], mean: Tensor) -> bool:
        """Whether its pieces are sums of what ``mean`` is of, not parts of the result, which may be
        of unlike sizes."""
        parts = self.parts(leaves, rule)
        if parts is None or any(x.shape != mean.shape for (x,) in parts):
            return False
        many = leaves[self.at[0]].numel() / max(1, mean.numel())
        return _equal(torch.stack([x for (x,) in parts]).sum(0) / many, mean)


def _has_nan(x: Tensor) -> bool:
    return x.is_floating_point() and bool(x.isnan().any())


def _other_mask(x: Any, g: torch.Generator) -> Any:
    is_mask = isinstance(x, Tensor) and x.dtype == torch.bool
    return torch.rand(x.shape, generator=g) < 0.5 if is_mask else x


def _other_indices(x: Any, g: torch.Generator) -> Any:
    """Integers as large as these, but for positions, and where something begins."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64) or not x.numel():
        return x
    values = x.reshape(-1)
    steps = values.diff()
    if not steps.any():  # all are the same
        return x + torch.randint(2, x.shape, generator=g).to(x.dtype)
    if (steps >= 0).all() or (steps <= 0).all():
        return x
    return values[torch.randperm(len(values), generator=g)].view(x.shape)


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
    size = x.shape[2]
    if size + 2 * pad < window.span:
        return
    if all(max(a, 0) < min(b, size) for a, b in window.rows(size, shares)):  # each has some
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
    if not b.is_floating_point():
        return bool(torch.equal(a, b))
    # Beside the small ones among them: numbers that stand for none, as what a mask leaves out, are
    # large, and zeros may be many.
    some = b.reshape(-1)[:: 1 + b.numel() // _FEW].abs().float()
    some = some[some > 0]
    small = float(some.kthvalue(1 + len(some) // 10).values) if len(some) else 0.0
    return torch.allclose(a, b, rtol=_ROUNDING, atol=_ROUNDING * small)
