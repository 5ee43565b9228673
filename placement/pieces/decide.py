"""Which operators of a graph to cut, by the time of operators, of their pieces, and of what must be
moved."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from placement.cluster import Link
from placement.graph import OpGraph
from placement.pieces.choose import Factor, least
from placement.pieces.frozen import frozen_calls, share_of
from placement.pieces.rules import (
    SUM,
    WHOLE,
    Cut,
    Rule,
    Shares,
    Window,
    cut_tensor,
    is_tensor,
    known_rules,
    piece_leaves,
    target_of,
)
from placement.pieces.split import ONE, Pieces
from placement.program import Param, Program, Ref, fill, leaves_of

Floats = NDArray[np.float64]
_ROUNDS = 3
_LEAST_S = 0.01  # of timing a call
_CACHE_BYTES = 2**25  # of parameters, more than which caches of a processor do not hold
_FAR_BYTES = 2**19  # of an operator's: fewer are read in less time than can be told
_SUMS = 1.05  # times as long: what is added up differs in its last digits, so it has to pay
_MANY = 4  # readers of a tensor beyond which each is charged its part of a move


@dataclass(frozen=True)
class Moves:
    """What moving costs: ``hop_s`` for being handed over, bytes per second on the way and in a
    copy."""

    hop_s: float = 150e-6
    bytes_per_s: float = 8e9
    copied_per_s: float = 8e9

    @classmethod
    def of(cls, links: Sequence[Link]) -> Moves:
        """Those between devices of a profile; whoever waits for a tensor has to be woken."""
        if not links:
            return cls()
        hops = [x.latency_s + x.wake_s + x.send_s + x.receive_s for x in links]
        speed = float(np.median([x.bandwidth_bytes_per_s for x in links]))
        return cls(float(np.median(hops)), min(speed, cls.bytes_per_s))

    def seconds(self, size: float, made: Cut, cut: Cut, k: int) -> float:
        """Of a tensor of ``size`` bytes that is made one way and read another; inf: cannot be."""
        if made == cut or (made == WHOLE and cut == ONE):
            return 0.0
        if isinstance(cut, Window):  # its pieces are those along a dimension, joined with seams
            own = self.seconds(size, made, cut.dim, k)
            return max(own, self.hop_s) + size / self.copied_per_s / k
        if cut == SUM:
            return np.inf
        sent, copied = size / self.bytes_per_s, size / self.copied_per_s
        if made in (ONE, WHOLE):
            return 0.0 if made == WHOLE else self.hop_s + (sent if cut == WHOLE else sent / k)
        rest = (k - 1) / k
        many = k - 1 if made == SUM else 1  # summands are as large as the sum
        if cut in (ONE, WHOLE):
            return self.hop_s + (sent * many if made == SUM else sent * rest) + copied * many
        return self.hop_s + sent * many / k + copied * many / k


@dataclass(frozen=True)
class Options:
    """Of an operator: its seconds whole, its rules, and the seconds of the longest piece by
    each."""

    whole_s: float
    rules: tuple[Rule, ...]
    piece_s: tuple[float, ...]


def options_of(
    graph: OpGraph, shares: Shares, sums: bool = True, compiled: bool = False
) -> list[Options]:
    """``[N]``: what can be done with each operator; equal operators are looked at once.

    Seconds are measured here, on the calling thread and its threads; ``compiled``: as part of
    compiled runs (see ``frozen``). Where no cache has room for all parameters, those of a large
    operator are read from memory, as they are in a call of the model.
    """
    program: Program = graph.program
    far = sum(x.nbytes for x in program.params) > _CACHE_BYTES
    values = dict(zip(program.input_tensors, program.example_tensors, strict=True))
    last = {t: n for n, step in enumerate(program.steps) for t in _reads(step)}
    seen: dict[Any, Options] = {}
    options = []
    with torch.no_grad():
        for n, step in enumerate(program.steps):
            template = (step.args, step.kwargs)
            places = [x for x in leaves_of(template) if isinstance(x, Ref | Param)]
            key = graph.op_signature[n], tuple(isinstance(x, Param) for x in places)
            arguments = fill(template, values, program.params)
            if key not in seen:
                own = [x for x, is_p in zip(_tensors(arguments), key[1], strict=True) if is_p]
                is_far = far and sum(x.nbytes for x in own) > _FAR_BYTES
                clock = _Clock(step.target, key[1], compiled, is_far)
                seen[key] = _looked_at(step, arguments, key[1], shares, sums, clock)
            options.append(seen[key])
            value = step.target(*arguments[0], **arguments[1])
            for t, i in zip(step.outputs, step.output_index, strict=True):
                values[t] = value[i] if step.multi else value
            for t in [t for t in _reads(step) if last[t] == n]:
                values.pop(t, None)
    return options


def _reads(step: Any) -> list[int]:
    return list(
        dict.fromkeys(x.tensor for x in leaves_of((step.args, step.kwargs)) if isinstance(x, Ref))
    )


def _tensors(arguments: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]


@dataclass(frozen=True)
class _Clock:
    """Times calls of an operator, or of its pieces.

    Attributes:
        target: which operator, and ``is_param`` of each tensor among its arguments.
        compiled: as part of a compiled run.
        far: with its parameters in memory, not in a cache.
    """

    target: Any
    is_param: Sequence[bool]
    compiled: bool
    far: bool

    def seconds(self, call: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
        """Of a call."""
        calls: list[Any] = []
        if self.compiled and not kwargs:
            calls = frozen_calls(self.target, args, self.is_param)
        if calls:
            return min(_seconds(each, self.far) for each in calls)
        share = share_of(self.target) if self.compiled else 1.0
        return share * _seconds(lambda: call(*args, **kwargs), self.far) if share else 0.0


def _looked_at(
    step: Any,
    arguments: Any,
    is_param: Sequence[bool],
    shares: Shares,
    sums: bool,
    clock: _Clock,
) -> Options:
    outputs = step.output_index if step.multi else None
    copies = pytree.tree_map_only(Tensor, lambda x: x.clone(), arguments)  # it may write
    rules = known_rules(step.target, copies, is_param, outputs, shares)
    if not sums:
        rules = [r for r in rules if SUM not in r.outputs]
    leaves, tree = pytree.tree_flatten(copies)
    tensors = [x for x in leaves if is_tensor(x)]
    args, kwargs = copies
    whole_s = clock.seconds(step.target, args, kwargs)
    call = target_of(step.target)
    times = []
    for rule in rules:
        cut = [cut_tensor(x, c, shares) for x, c in zip(tensors, rule.inputs, strict=True)]
        pieces = piece_leaves(leaves, rule, shares, list(zip(*cut, strict=True)))
        widest = int(np.argmax(shares))
        own_args, own_kwargs = pytree.tree_unflatten(pieces[widest], tree)
        piece_s = clock.seconds(call, own_args, own_kwargs)
        times.append(piece_s * (_SUMS if SUM in rule.outputs else 1.0))
    return Options(whole_s, tuple(rules), tuple(times))


def _seconds(call: Any, far: bool = False) -> float:
    """The least of a few timings, of the processor: other programs may take turns on the cores.

    ``far``: before each, something else fills the caches.
    """
    best, begin = np.inf, time.perf_counter()
    filler = torch.zeros(2 * _CACHE_BYTES // 4) if far else None
    for i in itertools.count():
        if filler is not None:
            filler.add_(1.0)
        start = time.process_time()
        call()
        best = min(best, (time.process_time() - start) / torch.get_num_threads())
        if i >= _ROUNDS and time.perf_counter() - begin > _LEAST_S:
            break
    return best


def decide(
    graph: OpGraph, shares: Shares, options: Sequence[Options], moves: Moves = Moves()
) -> Pieces:
    """The cuts with the least seconds of operators, one after another, and of moves."""
    program: Program = graph.program
    k = len(shares)
    domains = [1 + len(o.rules) for o in options]
    factors = [Factor((n,), np.array([o.whole_s, *o.piece_s])) for n, o in enumerate(options)]
    needs = _needs(graph, options)
    for t in range(graph.num_tensors):
        readers = graph.use_dst[graph.use_ptr[t] : graph.use_ptr[t + 1]].tolist()
        src, size = int(graph.tensor_src[t]), float(graph.tensor_bytes[t])
        made: list[Cut] = [ONE]
        if src >= 0:
            o = program.steps[src].outputs.index(t)
            made += [rule.outputs[o] for rule in options[src].rules]
        if t in graph.output_tensor and src >= 0:
            factors.append(Factor((src,), np.array([moves.seconds(size, m, ONE, k) for m in made])))
        shared = _shared(readers, needs, t) if 1 < len(readers) <= _MANY else []
        of_need = {}
        for need in shared:  # a move that several readers share is paid once
            of_need[need] = v = len(domains)
            domains.append(2)
            cost = np.array([[0.0, moves.seconds(size, m, need, k)] for m in made])
            factors.append(_of(src, v, cost))
        for n in readers:
            part = len(readers) if len(readers) > _MANY else 1
            own = [[x for x in cuts if x not in of_need] for cuts in needs[n][t]]
            cost = np.array(
                [
                    [sum(moves.seconds(size, m, x, k) / part for x in cuts) for cuts in own]
                    for m in made
                ]
            )
            factors.append(_of(src, n, cost))
            for need, v in of_need.items():
                table = np.zeros((len(needs[n][t]), 2))
                table[[need in cuts for cuts in needs[n][t]], 0] = np.inf
                factors.append(Factor((n, v), table))
    chosen = least(domains, factors)
    rules = {graph.op_name[n]: o.rules[chosen[n] - 1] for n, o in enumerate(options) if chosen[n]}
    return Pieces(shares, rules)


def _of(src: int, v: int, cost: Floats) -> Factor:
    return Factor((v,), cost[0]) if src < 0 else Factor((src, v), cost)


def _needs(graph: OpGraph, options: Sequence[Options]) -> list[dict[int, list[set[Cut]]]]:
    """``[N]``: tensor -> how it is read, whole and by each rule."""
    needs: list[dict[int, list[set[Cut]]]] = []
    for step, o in zip(graph.program.steps, options, strict=True):
        places = [x for x in leaves_of((step.args, step.kwargs)) if isinstance(x, Ref | Param)]
        own: dict[int, list[set[Cut]]] = {}
        for j, x in enumerate(places):
            if isinstance(x, Ref):
                rows = own.setdefault(x.tensor, [set() for _ in range(1 + len(o.rules))])
                rows[0].add(ONE)
                for i, rule in enumerate(o.rules):
                    rows[1 + i].add(rule.inputs[j])
        needs.append(own)
    return needs


def _shared(readers: Sequence[int], needs: Any, t: int) -> list[Cut]:
    """Ways in which more than one of the readers may read a tensor."""
    counts: dict[Cut, int] = {}
    for n in readers:
        for x in set().union(*needs[n][t]) - {ONE}:
            counts[x] = counts.get(x, 0) + 1
    return [x for x, c in counts.items() if c > 1]
