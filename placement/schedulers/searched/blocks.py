"""One micro-batch as blocks on devices: what the schedule search works on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from placement.graph import topological_order
from placement.tools.files import short
from placement.tools.limits import MOST
from placement.tools.strict import explain

Ints = NDArray[np.int64]

# "Cannot be reached" in tables of longest paths; sums of two still fit int64.
NEVER = -(2**60)


class BlocksError(ValueError):
    """The blocks, or the limits on them, are not valid; the message has the numbers."""


@dataclass(frozen=True)
class Block:
    """A piece of work that is never interrupted.

    Attributes:
        devices: all of them are busy from start to end.
        time: of the run, an integer of at least 1 (any unit).
        memory: change of what each of the devices holds, counted at the start.
        preds: (block, delay): starts no earlier than ``delay`` after the end of that block.
    """

    devices: tuple[int, ...]
    time: int
    memory: int = 0
    preds: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Work:
    """The blocks of **one** micro-batch, numbered in topological order.

    Micro-batches are identical and independent. A schedule gives every block of each of them
    a start, such that predecessors (and delays) are kept, no device runs two blocks at a time,
    and on every device no prefix sum of ``memory``, in the order of starts, exceeds ``limit``.

    Attributes:
        blocks: ``n`` of them.
        num_devices: ``D``.
        limit: the most memory each device may hold, or None.

    Raises:
        BlocksError: a block that is no block, or memory in which no micro-batch can run.
    """

    blocks: tuple[Block, ...]
    num_devices: int
    limit: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.blocks) <= MOST.blocks:
            raise BlocksError(f"{len(self.blocks)} blocks; from 1 to {MOST.blocks} are possible")
        if not 1 <= self.num_devices <= MOST.devices:
            raise BlocksError(
                f"ndevs = {self.num_devices}; from 1 to {MOST.devices} devices are possible"
            )
        for what, total in (
            ("predecessors", sum(len(b.preds) for b in self.blocks)),
            ("devices", sum(len(b.devices) for b in self.blocks)),
        ):
            if total > MOST.block_entries:
                raise BlocksError(
                    f"all blocks together have {total} {what}, at most {MOST.block_entries} "
                    "are possible"
                )
        time, memory = (sum(b.time for b in self.blocks), sum(abs(b.memory) for b in self.blocks))
        for what, total in (("take a time of", time), ("change memory by", memory)):
            if total > MOST.block_total:
                raise BlocksError(
                    f"all blocks together {what} {short(total)}, at most {MOST.block_total} is "
                    "possible: use a coarser unit"
                )
        for i, b in enumerate(self.blocks):
            if b.time < 1:
                raise BlocksError(f"block {i} takes {b.time}, must be at least 1")
            if not b.devices or not all(0 <= d < self.num_devices for d in b.devices):
                raise BlocksError(f"block {i}: devices {short(b.devices)} of {self.num_devices}")
            for p, delay in b.preds:
                if not 0 <= p < i or delay < 0:
                    raise BlocksError(
                        f"block {i}: predecessor {p} with delay {delay}; predecessors have "
                        "smaller numbers, delays are not negative"
                    )
        if self.limit is not None:
            self._check_memory(self.limit)

    def _check_memory(self, limit: tuple[int, ...]) -> None:
        if len(limit) != self.num_devices:
            raise BlocksError(f"{len(limit)} memory limits for {self.num_devices} devices")
        for d, on in enumerate(self.on):
            left = sum(self.blocks[b].memory for b in on)
            if left:
                raise BlocksError(
                    f"device {d}: every micro-batch leaves {left:+d} of memory behind; "
                    "under a limit the blocks of a device must release what they take"
                )
            takes = np.array([max(0, self.blocks[u].memory) for u in on], np.int64)
            frees = [v for v in on if self.blocks[v].memory < 0]
            before = takes @ (self.path[np.ix_(on, frees)] > NEVER)
            for v, taken in zip(frees, before.tolist(), strict=True):
                if -self.blocks[v].memory > taken:
                    raise BlocksError(
                        f"device {d}: block {v} releases {-self.blocks[v].memory} of memory, the "
                        f"blocks it waits for take {taken} there"
                    )
            largest = max((self.blocks[b].memory for b in on), default=0)
            if largest > limit[d]:
                raise BlocksError(
                    f"device {d}: a block takes {largest} of memory, the limit is {limit[d]}; "
                    "one micro-batch cannot run"
                )

    @property
    def num_blocks(self) -> int:
        """``n``."""
        return len(self.blocks)

    @cached_property
    def on(self) -> tuple[tuple[int, ...], ...]:
        """``[D]`` blocks of each device."""
        on: list[list[int]] = [[] for _ in range(self.num_devices)]
        for i, b in enumerate(self.blocks):
            for d in dict.fromkeys(b.devices):
                on[d].append(i)
        return tuple(map(tuple, on))

    @cached_property
    def load(self) -> tuple[int, ...]:
        """``[D]`` time per micro-batch of each device."""
        return tuple(sum(self.blocks[b].time for b in on) for on in self.on)

    @cached_property
    def path(self) -> Ints:
        """int64 ``[n, n]`` least time from a start to another; ``NEVER`` where free."""
        n = self.num_blocks
        far = np.full((n, n), NEVER)
        for v, block in enumerate(self.blocks):
            for u, delay in block.preds:
                lag = self.blocks[u].time + delay
                reached = far[:, u] > NEVER
                far[reached, v] = np.maximum(far[reached, v], far[reached, u] + lag)
            far[v, v] = 0
        return far

    @cached_property
    def head(self) -> Ints:
        """int64 ``[n]`` earliest start of each block of a micro-batch alone."""
        return np.maximum(self.path.max(axis=0), 0)

    @cached_property
    def tail(self) -> Ints:
        """int64 ``[n]`` least time from the start of each block to the end of its micro-batch."""
        time = np.array([b.time for b in self.blocks])
        return np.where(self.path > NEVER, self.path + time, NEVER).max(axis=1)

    @cached_property
    def pairs(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """``[D]`` (block that takes memory, later block that releases it, how much).

        All that a device takes is matched with what it releases, of those reachable where the
        path is longest; nothing for a device whose blocks cannot be matched like that, or are many.
        """
        return tuple(self._pairs(on) for on in self.on)

    def _pairs(self, on: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
        pairs: list[tuple[int, int, int]] = []
        if len(on) > 1024:
            return ()
        held = {v: -self.blocks[v].memory for v in on if self.blocks[v].memory < 0}
        for u in on:
            left = self.blocks[u].memory
            later = [v for v in held if held[v] and self.path[u, v] > NEVER]
            for v in sorted(later, key=lambda v: (held[v] != left, -int(self.path[u, v]))):
                amount = min(left, held[v])
                if amount > 0:
                    pairs.append((u, v, amount))
                    held[v] -= amount
                    left -= amount
            if left > 0:
                return ()
        return () if any(held.values()) else tuple(pairs)

    @cached_property
    def period_bound(self) -> Fraction:
        """No schedule takes less time per micro-batch in the long run.

        The busiest device; and, where memory is limited, the time that pairs hold memory.
        """
        bound = Fraction(max(self.load))
        for d, limit in enumerate(self.limit or ()):
            if limit > 0:
                bound = max(bound, Fraction(self._held(d), limit))
        return bound

    def _held(self, device: int) -> int:
        """Least memory x time of one micro-batch on a device."""
        return sum(
            amount * int(self.path[u, v] + self.blocks[v].time)
            for u, v, amount in self.pairs[device]
        )

    def makespan_bound(self, num_micro_batches: int) -> int:
        """No schedule of so many micro-batches is shorter."""
        n = num_micro_batches
        time = np.array([b.time for b in self.blocks])
        bound = int((self.head + self.tail).max())
        for d, on in enumerate(self.on):
            if not on:
                continue
            blocks = list(on)
            ends = int(self.head[blocks].min()) + int((self.tail - time)[blocks].min())
            bound = max(bound, ends + n * self.load[d])
            if self.limit is not None and self.pairs[d] and self.limit[d] > 0:
                takes, frees, _ = (list(x) for x in zip(*self.pairs[d], strict=True))
                ends = int(self.head[takes].min()) + int((self.tail - time)[frees].min())
                bound = max(bound, ends + ceil(n * self._held(d) / self.limit[d]))
        return bound

    def scaled(self, factor: int) -> Work:
        """The same work with all times multiplied."""
        blocks = tuple(
            replace(b, time=b.time * factor, preds=tuple((p, wait * factor) for p, wait in b.preds))
            for b in self.blocks
        )
        return replace(self, blocks=blocks)

    def errors(self, starts: Ints) -> list[str]:
        """What is wrong with starts int64 ``[N, n]`` of ``N`` micro-batches; empty if nothing."""
        wrong = []
        time = np.array([b.time for b in self.blocks])
        for v, block in enumerate(self.blocks):
            for u, delay in block.preds:
                early = starts[:, v] < starts[:, u] + time[u] + delay
                for j in np.flatnonzero(early)[:1]:
                    wrong.append(f"micro-batch {j}: block {v} starts before {u} has arrived")
        for d, on in enumerate(self.on):
            rows = sorted((int(starts[j, b]), j, b) for b in on for j in range(len(starts)))
            for (s, j, b), (t, i, c) in pairwise(rows):
                if t < s + time[b]:
                    wrong.append(f"device {d}: ({j}, {b}) and ({i}, {c}) overlap at {t}")
            held = np.cumsum([self.blocks[b].memory for _, _, b in rows])
            if self.limit is not None and len(rows) and held.max() > self.limit[d]:
                wrong.append(f"device {d}: holds {held.max()}, limit {self.limit[d]}")
        return wrong


def read_work(case: dict[str, Any], memory: int | None) -> tuple[Work, list[int]]:
    """The work of a case (see ``cli/schedule.py`` for the format), and its block ids by number.

    Raises:
        BlocksError: the case is not of that format, its blocks depend on each other in a
            circle, or no micro-batch fits into the memory.
    """
    try:
        read = _Case.model_validate(case)
    except ValidationError as error:
        raise BlocksError(f"not a case: {explain(error, _Record, case)}") from error
    rows = {row.id: row for row in read.blocks}
    if len(rows) < len(read.blocks):
        twice = Counter(row.id for row in read.blocks).most_common(1)[0][0]
        raise BlocksError(f"two blocks have the same id {twice}")
    for i, row in rows.items():
        for d in row.devices:
            if not 0 <= d < read.ndevs:
                raise BlocksError(
                    f"block {i}: devices has {d}; ndevs = {read.ndevs}: they are from 0"
                )
        for p in row.deps:
            if p not in rows:
                raise BlocksError(f"block {i}: deps has {p}, which is the id of no block")
    ids, place = list(rows), {i: k for k, i in enumerate(rows)}
    edges = sorted({(place[p], place[i]) for i, row in rows.items() for p in row.deps})
    order = [ids[k] for k in topological_order(np.array(edges, np.int64).reshape(-1, 2), len(ids))]
    if len(order) < len(ids):
        stuck = sorted(set(ids) - set(order))
        raise BlocksError(f"blocks {short(stuck)} wait for each other, or for such as do")
    number = {i: n for n, i in enumerate(order)}
    limit = None if memory is None or read.mode == "infer" else (memory,) * read.ndevs
    blocks = tuple(
        Block(
            tuple(sorted(set(row.devices))),
            row.time,
            row.memory if read.mode == "train" else 0,
            tuple((number[p], 0) for p in dict.fromkeys(row.deps)),
        )
        for row in map(rows.__getitem__, order)
    )
    return Work(blocks, read.ndevs, limit), order


def _without_fraction(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Whole = Annotated[
    int, Field(strict=True, gt=-(2**63), lt=2**63), BeforeValidator(_without_fraction)
]


class _Record(BaseModel):
    """What a case says; keys that are not known are passed over."""


class _Row(_Record):
    id: _Whole
    devices: Annotated[list[_Whole], Field(min_length=1)]
    time: Annotated[_Whole, Field(ge=1)]
    memory: _Whole
    deps: list[_Whole]


class _Case(_Record):
    ndevs: _Whole
    blocks: list[_Row]
    mode: Literal["train", "infer"] = "train"
