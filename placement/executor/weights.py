"""Parameters in the memory of GPUs: copied once, and kept for the next runner of the module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from placement.program import Program, storage_of, view_of

# cuDNN's number of a recurrent operator, and by how many its hidden weights are stacked.
_RECURRENT = {
    "aten.rnn_relu.input": (0, 1),
    "aten.rnn_tanh.input": (1, 1),
    "aten.lstm.input": (2, 4),
    "aten.gru.input": (3, 3),
}
_version, _shape = attrgetter("_version"), attrgetter("shape")
Place = tuple[int, torch.Size, tuple[int, ...]]  # address, shape and strides
State = tuple[Place, int]  # where a parameter is, and how often it was written
Key = tuple[torch.device, int]  # device and parameter


@dataclass(eq=False)
class Copy:
    """A parameter in other memory, which runners share: as it was in this ``state``."""

    tensor: Tensor
    state: State


_copied_as = attrgetter("state")
Kept = dict[Key, Copy]

# By device: the program of the runner that was started last, and the copies that it uses.
_kept: dict[torch.device, tuple[weakref.ref[Program], Kept]] = {}
# What runners stream, by the parameter that it is a copy of, which they keep alive.
_pinned: weakref.WeakValueDictionary[Any, Copy] = weakref.WeakValueDictionary()


class Copies:
    """Parameters in other memory than the module's.

    Attributes:
        made: by device and parameter.
    """

    def __init__(self) -> None:
        self.made: dict[Key, Copy] = {}
        # What is copied, and as this runner saw it last; lists, as every call compares them and a
        # GPU waits.
        self._values: list[Tensor] = []
        self._states: list[State] = []

    def add(self, key: Key, value: Tensor, copy: Copy) -> None:
        """``copy`` was made of ``value``."""
        self.made[key] = copy
        self._values.append(value)
        self._states.append(copy.state)

    def refresh(self) -> bool:
        """Copy what was written since again, on the calling thread's stream; whether any was.

        Another runner may have copied it: that counts as written too.

        Raises:
            ValueError: one has another shape now.
        """
        now = states_of(self._values)
        if now == self._states and now == [*map(_copied_as, self.made.values())]:
            return False
        with torch.inference_mode():  # in which copies may have been made
            for copy, value, state in zip(self.made.values(), self._values, now, strict=True):
                if copy.state != state:
                    if value.shape != copy.tensor.shape:
                        raise ValueError(
                            f"a parameter is of shape {tuple(value.shape)} now, but was captured "
                            f"with {tuple(copy.tensor.shape)}: capture again"
                        )
                    copy.tensor.copy_(value.detach())
                    copy.state = state
        self._states = now
        return True

    def keep(self, program: Program) -> None:
        """Keep these for the next runner of the program; what runners before had is forgotten.

        So a device holds no more than this runner needs, and nothing when the program is gone.
        """
        for device in {device for device, _ in self.made}:
            mine = {key: copy for key, copy in self.made.items() if key[0] == device}
            _remember(device, program, mine)


def on(device: torch.device, program: Program, p: int) -> Copy:
    """Parameter ``p`` in the memory of ``device``, not to be written there.

    The copy that the runner before used, unless the parameter was written since (which a write
    through ``parameter.data`` does not show).
    """
    value = program.params[p].detach()
    state = state_of(value)
    entry = _kept.get(device)
    if entry is not None and entry[0]() is program:
        copy = entry[1].get((device, p))
        if copy is not None and copy.state == state:
            return copy
    return Copy(value.to(device), state)


def pinned(program: Program, p: int) -> Copy:
    """Parameter ``p`` in page-locked host memory: one copy for all runners that stream it.

    Raises:
        RuntimeError: the machine does not page-lock that much memory.
    """
    value = program.params[p].detach()
    copy = _pinned.get(view_of(value))
    if copy is None:
        empty = torch.empty_like(value, device=torch.device("cpu"), pin_memory=True)
        copy = _pinned[view_of(value)] = Copy(empty, state_of(value))
    with torch.inference_mode():  # in which it may have been made
        copy.tensor.copy_(value)
    copy.state = state_of(value)
    return copy


def flatten(program: Program, ops: Iterable[int], params: dict[int, Tensor]) -> None:
    """Put the copied weights of each recurrent operator one after another, as cuDNN reads them.

    Else it copies them together in every call. Parameters in the module's own memory stay as they
    are.
    """
    for op in ops:
        step = program.steps[op]
        if str(step.target) not in _RECURRENT or len(step.args) != 9:
            continue
        mode, gates = _RECURRENT[str(step.target)]
        _, _, leaves, _, layers, _, _, both, batch_first = step.args
        mine = [params[x.index] for x in leaves]
        is_own = any(
            params[x.index].data_ptr() == program.params[x.index].data_ptr() for x in leaves
        )
        places = {storage_of(x) for x in mine}
        if is_own or len(places) < len(mine):  # as they are, or done by a runner before
            continue
        each = len(mine) // (layers * (2 if both else 1))
        projected = mine[each - 1].shape[0] if each in (3, 5) else 0
        form = mine[0].shape[1], mode, mine[0].shape[0] // gates, projected, layers
        # Where cuDNN is not, or does not do this dtype, they stay as they are too.
        with torch.no_grad(), torch.cuda.device(mine[0].device), suppress(RuntimeError):
            torch._cudnn_rnn_flatten_weight(mine, each, *form, batch_first, both)  # type: ignore[arg-type]


def forget_others(device: torch.device, program: Program, read: set[int]) -> None:
    """Drop kept copies that are not of these parameters: their memory may be needed.

    Copies that a program of the same module kept, for other inputs, are this one's from now on.
    """
    entry = _kept.pop(device, None)
    before = None if entry is None else entry[0]()
    if entry is None or before is None:
        return
    copies = entry[1]
    if before is not program:
        of = {view_of(before.params[p]): copy for (_, p), copy in copies.items()}
        mine = {p: of.get(view_of(program.params[p])) for p in read if p < len(program.params)}
        copies = {(device, p): copy for p, copy in mine.items() if copy is not None}
    here = {key: copy for key, copy in copies.items() if key[1] in read}
    _remember(device, program, here)


def _remember(device: torch.device, program: Program, copies: Kept) -> None:
    """Until another runner is started there, or the program is gone."""

    def forget(ref: Any) -> None:
        if device in _kept and _kept[device][0] is ref:
            del _kept[device]

    _kept[device] = weakref.ref(program, forget), copies


def state_of(value: Tensor) -> State:
    """Where a parameter is, and how often it was written."""
    return states_of([value])[0]


def states_of(values: Sequence[Tensor]) -> list[State]:
    """``state_of`` each."""
    try:  # without a loop in Python
        versions = [*map(_version, values)]
    except RuntimeError:  # nobody counts how often an inference tensor is written
        versions = [-1 if x.is_inference() else x._version for x in values]
    return list(zip(places_of(values), versions, strict=True))


def places_of(values: Sequence[Tensor]) -> list[Place]:
    """Where each is, and how its memory is seen; setting ``parameter.data`` counts as no write."""
    forms = map(_shape, values), map(Tensor.stride, values)
    return list(zip(map(Tensor.data_ptr, values), *forms, strict=True))
