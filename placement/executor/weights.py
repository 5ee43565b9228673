"""Parameters in the memory of GPUs: copied once, and kept for the next runner of the module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from placement.program import Program, storage_of

# cuDNN's number of a recurrent operator, and by how many its hidden weights are stacked.
_RECURRENT = {
    "aten.rnn_relu.input": (0, 1),
    "aten.rnn_tanh.input": (1, 1),
    "aten.lstm.input": (2, 4),
    "aten.gru.input": (3, 3),
}
_version = attrgetter("_version")
State = tuple[int, int]  # where a parameter is, and how often it was written
Copies = dict[tuple[torch.device, int], tuple[State, Tensor]]  # by device and parameter

# By device: the program of the runner that was started last, and the copies that it uses.
_kept: dict[torch.device, tuple[weakref.ref[Program], Copies]] = {}


def on(device: torch.device, program: Program, p: int) -> tuple[State, Tensor]:
    """Parameter ``p`` in the memory of ``device``, not to be written there, and of which state.

    The copy that the runner before used, unless the parameter was written since (which a write
    through ``parameter.data`` does not show).
    """
    value = program.params[p].detach()
    state = state_of(value)
    entry = _kept.get(device)
    if entry is not None and entry[0]() is program:
        known, copy = entry[1].get((device, p), (None, None))
        if copy is not None and known == state:
            return state, copy
    return state, value.to(device)


def refresh(program: Program, copies: Copies) -> bool:
    """Copy what was written since again, on the calling thread's stream; whether any was."""
    values = [program.params[p] for _, p in copies]
    now, before = _states(values), [state for state, _ in copies.values()]
    if now == before:
        return False
    for key, value, state, known in zip([*copies], values, now, before, strict=True):
        if state != known:
            copy = copies[key][1]
            with torch.inference_mode():  # in which it may have been made
                copy.copy_(value.detach())
            copies[key] = state, copy
    return True


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
        of = {_memory(before.params[p]): copy for (_, p), copy in copies.items()}
        mine = {p: of.get(_memory(program.params[p])) for p in read if p < len(program.params)}
        copies = {(device, p): copy for p, copy in mine.items() if copy is not None}
    here = {key: copy for key, copy in copies.items() if key[1] in read}
    _remember(device, program, here)


def _memory(value: Tensor) -> tuple[Any, ...]:
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def keep(program: Program, copies: Copies) -> None:
    """Keep the copies of a runner; what runners before had on these devices is forgotten.

    So a device holds no more than this runner needs, and nothing when the program is gone.
    """
    for device in {device for device, _ in copies}:
        _remember(device, program, {k: copy for k, copy in copies.items() if k[0] == device})


def _remember(device: torch.device, program: Program, copies: Copies) -> None:
    """Until another runner is started there, or the program is gone."""

    def forget(ref: Any) -> None:
        if device in _kept and _kept[device][0] is ref:
            del _kept[device]

    _kept[device] = weakref.ref(program, forget), copies


def state_of(value: Tensor) -> State:
    """Where a parameter is, and how often it was written."""
    return _states([value])[0]


def _states(values: Sequence[Tensor]) -> list[State]:
    try:  # without a loop in Python: every call does this, and a GPU waits for it
        return list(zip(map(Tensor.data_ptr, values), map(_version, values), strict=True))
    except RuntimeError:  # nobody counts how often an inference tensor is written
        return [(x.data_ptr(), -1 if x.is_inference() else x._version) for x in values]
