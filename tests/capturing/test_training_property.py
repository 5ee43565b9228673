"""Random modules train as in plain PyTorch, or are refused by name, and stay as they were."""

from __future__ import annotations

import copy
import os
import re

import numpy as np
import torch
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from placement.capturing import capture
from placement.capturing.training import plain_step
from placement.cluster import Cluster, Device
from placement.executor import Trainer
from placement.program import CaptureError
from placement.tools.threads import torch_threads
from tests.module_grammar import batches, build, draws, kinds_of, parts

CORE = min(os.sched_getaffinity(0))
EXAMPLES = int(os.environ.get("TRAINING_EXAMPLES", "12"))

# The parts that may be refused, and how the message names them.
REFUSED = {
    "batch_norm_of_all": r"BatchNorm1d\(.*momentum=None",
    "checkpoint": "changes in a checkpoint",
    "reentrant": "changes in a checkpoint",
}


def state_of(module: nn.Module) -> dict[str, object]:
    """What ``capture`` must not change."""
    return {
        "modes": [m.training for m in module.modules()],
        "values": {k: v.tolist() for k, v in module.state_dict().items()},
        "trainable": [(p.requires_grad, p.grad) for p in module.parameters()],
        "random": torch.get_rng_state().tolist(),
        "attributes": [sorted(vars(m)) for m in module.modules()],
    }


@settings(max_examples=EXAMPLES, phases=[Phase.generate])  # a sentence is small as it is
@given(
    sentence=parts(),
    num_devices=st.integers(2, 3),
    num_microbatches=st.integers(1, 2),
    adaptive=st.booleans(),
    colocate=st.booleans(),
    seed=st.integers(0, 99),
)
def test_two_steps_equal_plain_pytorch(
    sentence, num_devices, num_microbatches, adaptive, colocate, seed
):
    """Two steps on a random placement, also in turns; run thousands with TRAINING_EXAMPLES=..."""
    check(sentence, num_devices, num_microbatches, adaptive, colocate, seed)


def check(sentence, num_devices, num_microbatches, adaptive, colocate, seed):
    """Whether the module was captured, and then trained alike; false if it was refused."""
    module = build(sentence, seed)
    plain = copy.deepcopy(module)
    optimizer, expected = (
        torch.optim.Adam(m.parameters(), lr=1e-3, eps=1e-2)
        if adaptive
        else torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
        for m in (module, plain)
    )
    if draws(sentence):  # the same numbers only if operators run one after the other
        num_devices = num_microbatches = 1
    data = batches(2 * num_microbatches, seed)
    steps = [data[:num_microbatches], data[num_microbatches:]]
    losses = []
    try:
        for i, mine in enumerate(steps):
            torch.manual_seed(seed + i)
            with torch_threads(1):
                losses.append(plain_step(plain, expected, mine, F.mse_loss))
    except RuntimeError:  # e.g. in place on what a checkpoint keeps: it trains nowhere
        reject()
    before = state_of(module)
    try:
        options = {"loss": F.mse_loss, "optimizer": optimizer, "colocate_backward": colocate}
        graph = capture(module, data[0], mode="training", **options)
    except CaptureError as error:
        reasons = [REFUSED[kind] for kind in kinds_of(sentence) & REFUSED.keys()]
        assert any(re.search(reason, str(error)) for reason in reasons), error
        assert state_of(module) == before
        return False
    assert state_of(module) == before
    devices = tuple(Device(f"cpu:{i}", "cpu", (CORE,)) for i in range(num_devices))
    groups = np.random.default_rng(seed).integers(0, num_devices, (1 + seed % 3, graph.num_groups))
    for writer, readers in graph.carried.items() if len(groups) > 1 else ():
        groups[:, graph.group[[writer, *readers]]] = 0  # where the next micro-batch reads it
    placement = groups[:, graph.group].astype(np.int32)
    gradients = {t for _, t in graph.program.gradients}
    assert set(graph.gradient_tensor.tolist()) == gradients
    with Trainer(graph, Cluster("tests", devices), placement, optimizer) as trainer:
        for i, mine in enumerate(steps):
            torch.manual_seed(seed + i)
            torch.testing.assert_close(trainer.step(mine), losses[i])
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
    return True
