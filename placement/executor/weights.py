"""Parameters in the memory of GPUs: copied once, and kept for the next runner of the program."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from placement.program import Program

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
    state = _state(value)
    kept = _kept.get(device)
    if kept is not None and kept[0]() is program:
        known, copy = kept[1].get((device, p), (None, None))
        if copy is not None and known == state:
            return state, copy
    return state, value.to(device)


def refresh(program: Program, copies: Copies) -> None:
    """Copy what was written since again, on the calling thread's stream."""
    for key, (state, copy) in copies.items():
        value = program.params[key[1]].detach()
        if state != (now := _state(value)):
            with torch.no_grad():
                copy.copy_(value)
            copies[key] = now, copy


def forget_others(device: torch.device, program: Program, read: set[int]) -> None:
    """Drop kept copies that are not of these parameters: their memory may be needed."""
    kept = _kept.get(device)
    if kept is not None:
        is_same = kept[0]() is program
        for key in [key for key in kept[1] if not (is_same and key[1] in read)]:
            del kept[1][key]


def keep(program: Program, copies: Copies) -> None:
    """Keep the copies of a runner; what runners before had on these devices is forgotten.

    So a device holds no more than this runner needs, and nothing when the program is gone.
    """
    for device in {device for device, _ in copies}:

        def forget(ref: Any, device: torch.device = device) -> None:
            if device in _kept and _kept[device][0] is ref:
                del _kept[device]

        mine = {key: copy for key, copy in copies.items() if key[0] == device}
        _kept[device] = weakref.ref(program, forget), mine


def _state(value: Tensor) -> State:
    # Nobody counts how often an inference tensor is written.
    return value.data_ptr(), -1 if value.is_inference() else value._version
