"""A stack of LSTM layers (Hochreiter and Schmidhuber, 1997) unrolled over time.

Cell (l, t) of the ``layers x steps`` grid needs cells (l - 1, t) and (l, t - 1) only, so a
placement may cut the grid along either axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from placement.workloads import seeded


def lstm(batch: int = 1, layers: int = 4, steps: int = 16, hidden: int = 512) -> tuple[Any, Any]:
    """Four layers of 512 units over 16 steps: 8.4 M parameters."""
    with seeded():
        return UnrolledLSTM(layers, hidden).eval(), (torch.randn(batch, steps, hidden),)


def lstm_tiny(batch: int = 1) -> tuple[Any, Any]:
    """Two layers of 8 units over 3 steps."""
    return lstm(batch, layers=2, steps=3, hidden=8)


class UnrolledLSTM(nn.Module):
    def __init__(self, layers: int, hidden: int):
        super().__init__()
        self.cells = nn.ModuleList(Cell(hidden) for _ in range(layers))

    def forward(self, sequence: Tensor) -> Tensor:
        """``[batch, steps, hidden]`` to the same shape."""
        rows = list(sequence.unbind(1))
        zero = torch.zeros_like(rows[0])
        for cell in self.cells:
            state = (zero, zero)
            for t, x in enumerate(rows):
                state = cell(x, *state)
                rows[t] = state[0]
        return torch.stack(rows, 1)


class Cell(nn.Module):
    """One cell as separate operators; ``nn.LSTMCell`` would be a single one."""

    def __init__(self, hidden: int):
        super().__init__()
        self.from_input = nn.Linear(hidden, 4 * hidden)
        self.from_state = nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        take, keep, new, show = (self.from_input(x) + self.from_state(h)).chunk(4, 1)
        c = keep.sigmoid() * c + take.sigmoid() * new.tanh()
        return show.sigmoid() * c.tanh(), c
