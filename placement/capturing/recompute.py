"""Activation recomputation: a training step that computes activations again in its backward.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174 (2016): what the
backward of a block reads from its own forward is not kept, but computed a second time from the
block's inputs. Memory falls, and the block's forward is paid for twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from placement.capturing.exported import is_random
from placement.capturing.joint import Joint
from placement.capturing.pieces import Piece, made_by, reads_of, root_of
from placement.program import CaptureError, Param

_OF_THE_BATCH = torch.ops.aten.batch_norm.default


def recompute(
    joint: Joint, pieces: list[Piece], paths: Sequence[str], blocks: Sequence[str]
) -> list[Piece]:
    """The same training step with the activations inside ``blocks`` computed again.

    ``blocks`` are module paths, e.g. ``layers.3``, and ``paths`` those of the forward's calls. The
    second forward of a block waits for the gradient that its backward begins with, and is colocated
    like the first. Kept are what other modules read, and the results of operators that read a
    buffer which the step changes, except batch normalisation's. Parameters, buffers, losses and
    gradients are the same.

    ::

        before:  F1 F2 F3 . . . B3 B2 B1     F1's result is kept from F1 to B1
        after:   F1 F2 F3 . . . F1' B3 ...   with block (1, 2, 3): F1' F2' follow the gradient

    Raises:
        CaptureError: no such module, a step that draws random numbers, or a block that no gradient
            enters from outside.
    """
    if blocks and any(map(is_random, joint.kernels)):
        raise CaptureError(
            "the step draws random numbers (dropout): computed again they would be others; set "
            "the dropout rates to 0, or recompute nothing"
        )
    for block in blocks:
        pieces = _recompute(joint, pieces, paths, block)
    return pieces


def _recompute(joint: Joint, pieces: list[Piece], paths: Sequence[str], block: str) -> list[Piece]:
    at: dict[Any, int] = {kernel: n for n, piece in enumerate(pieces) for kernel in piece.kernels}
    inside = [f"{paths[piece.call]}.".startswith(f"{block}.") for piece in pieces]
    if not any(inside):
        modules = ", ".join(sorted({paths[piece.call] for piece in pieces} - {""}))
        raise CaptureError(f"no module {block!r} to recompute; modules are {modules}")
    late = [piece.is_late for piece in pieces]
    reads = [{root: at[made_by(root)] for root in reads_of(piece)} for piece in pieces]
    backward = [n for n in range(len(pieces)) if inside[n] and late[n]]
    entering = [
        (m, root) for n in backward for root, m in reads[n].items() if late[m] and not inside[m]
    ]
    if not entering:
        raise CaptureError(
            f"no gradient enters {block!r} from another module: its activations are needed at "
            "once; recompute blocks before it"
        )
    start, trigger = min(entering, key=lambda x: x[0])
    backward = [n for n in backward if n > start]  # the forward may have gradients inside
    changed = {i for i, _ in joint.new_buffers}
    buffers = {n for n, x in joint.source.items() if isinstance(x, Param) and x.index in changed}
    writers = {at[made_by(root_of(node))] for _, node in joint.new_buffers}

    def is_fixed(n: int) -> bool:
        # What batch normalisation makes of a batch depends on that alone: others get statistics.
        read = {root_of(x) for kernel in pieces[n].kernels for x in kernel.all_input_nodes}
        on_batch = joint.calls[pieces[n].call].target is _OF_THE_BATCH
        return not on_batch and (n in writers or not buffers.isdisjoint(read))

    stays = {root for n, read in enumerate(reads) if late[n] and not inside[n] for root in read}
    stays |= {joint.loss, root_of(joint.loss)}  # all these are stored for others anyway

    def goes(root: fx.Node, n: int) -> bool:
        return inside[n] and not late[n] and root not in stays and not is_fixed(n)

    again: set[int] = set()
    left = [m for n in backward for root, m in reads[n].items() if goes(root, m)]
    while left:
        if (n := left.pop()) not in again:
            again.add(n)
            left += [m for root, m in reads[n].items() if goes(root, m)]
    copies: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node) -> fx.Node:
        """The node, or its copy if it depends on what runs again."""
        if node.op != "call_function" or at.get(made_by(root_of(node)), -1) not in again:
            return node
        if node not in copies:
            copies[node] = node.graph.node_copy(node, copied)
        return copies[node]

    second = []
    for n in sorted(again):
        # One that reads no other copy could run at once: it waits for the gradient.
        waits = again.isdisjoint(reads[n].values())
        kernels = [copied(kernel) for kernel in pieces[n].kernels]
        first = pieces[n]
        second.append(Piece(first.call, first.suffix, kernels, first, trigger if waits else None))
    for kernel in (kernel for n in backward for kernel in pieces[n].kernels):
        for node in kernel.all_input_nodes:
            kernel.replace_input_with(node, copied(node))
    return [*pieces[: start + 1], *second, *pieces[start + 1 :]]
