"""A torch module becomes an ``OpGraph`` and the ``Program`` that runs it.

``exported``: torch's own graph of operators; ``errors``: what to say where there is none;
``numerics``: whether it computes what a call does;
``inference``: the graph, node by node. Of training: ``replay`` keeps what a module says to
autograd, ``joint`` traces loss and gradients, ``pieces`` cuts them into operators, ``recompute``
trades memory for work, ``training`` puts them together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from placement.capturing.inference import capture_inference
from placement.capturing.training import capture_training
from placement.graph import OpGraph
from placement.program import CaptureError


def capture(
    module: nn.Module,
    example_inputs: Any,
    *,
    name: str | None = None,
    mode: Literal["inference", "training"] = "inference",
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    colocate_backward: bool = True,
    split_backward: bool = False,
    recompute: Sequence[str] = (),
) -> OpGraph:
    """The operator graph of ``module`` for inputs shaped like ``example_inputs``.

    *Inference*: the module is captured as it computes in evaluation mode without gradients; its
    own mode is left as it was (a warning says where that computes something else).
    ``graph.program`` (a ``Program``) runs it with the module's own parameters. Views, and in-place
    operators, share the colocation group of the operator whose memory they use; tied parameters
    count once; parameters that no operator reads are left out.

    *Training*: what one micro-batch does in a training step: forward, backward, and gradients,
    which are added up where the backward operator runs. The module is captured in training mode
    (submodules in evaluation mode stay so, unless the whole module is). Memory of gradients and
    of the optimizer's state counts like parameters. Run it with ``placement.Trainer``.

    Args:
        example_inputs: a tensor; a tuple of positional arguments; a mapping of keyword arguments;
            or ``(args, kwargs)``, a tuple and a dict. Of tensors only shapes and dtypes
            are kept. With ``loss``: a pair ``(inputs, target)`` of that and of what the loss takes.
        name: name of the graph; the name of the module's class if not given.
        loss: of training: ``loss(module(inputs), target)`` is the loss of a micro-batch. Without
            it the module returns the loss: itself, as its first output, or as output ``loss``.
        optimizer: of training, over the module's parameters: the bytes it will keep count as
            memory, and only its parameters get gradients.
        colocate_backward: of training: a backward operator is on the device of its forward.
        split_backward: of training: gradients of weights, which nothing waits for, are operators
            of their own (what zero-bubble schedules need); convolutions then run two kernels.
        recompute: of training: modules (e.g. ``layers.3``) whose activations are computed again
            for their backward, not kept: less memory, more work (see ``recompute``).

    Raises:
        CaptureError: the module fails on these inputs, does not export (data-dependent control
            flow or shapes, unsupported types), or changes its inputs; for inference, if it
            changes its buffers, or computes other numbers when it is called (which is done once);
            autocast is on; for training, if it changes its parameters or there is no loss.
    """
    if not isinstance(module, nn.Module):
        raise CaptureError(f"a {type(module).__name__} is given, not a torch.nn.Module")
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise CaptureError(
            "autocast is on around the capture, but would not be where the module is run: use it "
            "in the module's forward, or capture outside of it"
        )
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        raise CaptureError(
            f"optimizer = {optimizer!r:.60} is no torch.optim.Optimizer: make one of the module's "
            "parameters(), e.g. torch.optim.AdamW(module.parameters())"
        )
    if mode == "training":
        return capture_training(
            module,
            example_inputs,
            name=name,
            loss=loss,
            optimizer=optimizer,
            colocate_backward=colocate_backward,
            split_backward=split_backward,
            blocks=recompute,
        )
    if mode != "inference":
        raise CaptureError(f"mode {mode!r} is unknown; use 'inference' or 'training'")
    if loss is not None or optimizer is not None or recompute:
        raise CaptureError(
            "loss, optimizer and recompute are for training: capture(..., mode='training')"
        )
    if any(m.training and isinstance(m, _BatchNorm | _DropoutNd) for m in module.modules()):
        # Modules begin in training mode; only these would compute something else in it.
        warnings.warn(
            f"{name or type(module).__name__} is in training mode: its dropout and batch "
            "normalisation are captured as in evaluation, module.eval(); for training: "
            "mode='training', on the command line --mode training",
            stacklevel=2,
        )
    return capture_inference(module, example_inputs, name)
