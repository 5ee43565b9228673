"""``Buffer``: what of the parameters that stay in host memory is on a device, and comes there next.

The rule, which the simulator predicts by and the runtime follows:

1. Operators of a device that streams have an order of use, which begins again when it has ended.
2. Their parameters are copied one operator after another in that order, each as early as the buffer
   has room: it holds what was copied from then until its place is needed again.
3. The buffer is a ring. What comes begins where what came before it ended, or at the buffer's begin
   where it would reach beyond the end. So what has been there longest is overwritten first; only
   after the use that it came for has ended.
4. What is still there when its turn comes is not copied again: it stays for another use.
5. Where the device takes an operator whose parameters are not there (another order, or several
   micro-batches in flight) they are copied next, over whatever; the order goes on behind it.
6. What is copied next is decided when an operator is taken and when its use ends, for all copies
   that may begin then; they wait for their turn on the link. So the order of copies follows from
   the order in which operators are taken, whatever takes how long.

A call after another finds the buffer as the first left it, or another part of the ring is next:
then calls differ, until the first part is next again.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import NamedTuple

ALIGNED = 256  # bytes: parameters begin at multiples, as kernels may read several numbers at once
CALLS = 9  # at most, one after another, that are simulated until a buffer is as after the first
NOT_LONGER = 1.0 + 1e-12  # than others, but for rounding


class Copy(NamedTuple):
    """The parameters of ``op`` come to byte ``begin`` of a buffer, over those of ``over``."""

    op: int
    begin: int
    over: list[int]


class Buffer:
    """``room`` bytes on a device, for operators whose parameters have ``sizes``, in order of use.

    Attributes:
        there: where the parameters of operators are or come, oldest first: bytes from the begin of
            the first round, as if the buffer had no end.
        promised: operators whose use has not ended since their parameters came.
    """

    def __init__(self, sizes: Mapping[int, int], room: int) -> None:
        self.sizes, self.room = sizes, room
        self.there: dict[int, int] = {}
        self.promised: set[int] = set()
        self._order, self._turn, self._end = [*sizes], 0, 0
        self._turn_of = {op: turn for turn, op in enumerate(self._order)}
        self._wanted: int | None = None

    def take(self, op: int) -> bool:
        """``op`` is what the device runs next; False: its parameters are not there: they come."""
        if op in self.there:
            self.promised.add(op)
            return True
        self._wanted = op
        return False

    def give_back(self, op: int) -> None:
        """What ``op`` read may be overwritten."""
        self.promised.discard(op)

    def forget(self) -> None:
        """Nothing is there any more; the order begins again."""
        self.there.clear()
        self.promised.clear()
        self._turn, self._wanted = 0, None

    @property
    def layout(self) -> tuple[int, int]:
        """Where what comes next begins, and which in turn that is."""
        return self._end % self.room, self._turn

    def copy(self) -> Copy | None:
        """The next copy, which is under way from now on; None: none can begin."""
        op = self._next() if self._wanted is None else self._wanted
        if op is None:
            return None
        begin, size = self._end, self.sizes[op]
        if begin % self.room + size > self.room:
            begin += self.room - begin % self.room
        least = begin + size - self.room
        over = [other for other, _ in takewhile(lambda x: x[1] < least, self.there.items())]
        if self._wanted is None and not self.promised.isdisjoint(over):
            return None
        for other in over:
            del self.there[other]
            self.promised.discard(other)
        self.there[op], self._end, self._wanted = begin, begin + size, None
        self.promised.add(op)
        self._turn = (self._turn_of[op] + 1) % len(self._order)
        return Copy(op, begin % self.room, over)

    def _next(self) -> int | None:
        """The first in turn that is not there; None: all are."""
        while (op := self._order[self._turn]) in self.there:
            if op in self.promised:
                return None
            self.promised.add(op)
            self._turn = (self._turn + 1) % len(self._order)
        return op
