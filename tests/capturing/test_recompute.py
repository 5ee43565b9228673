"""Recomputed activations: the same losses and gradients, less memory, more work."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from placement.capturing import capture
from placement.capturing.training import plain_step
from placement.executor import Trainer
from placement.graph import OpGraph
from placement.program import CaptureError
from placement.simulator import simulate
from tests.machine import TWO, problem_of
from tests.module_grammar import Part, batches, build
from tests.modules import module_of

pytestmark = pytest.mark.timeout(60)


class Block(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        # A bias before batch normalisation has no gradient but rounding, which Adam enlarges.
        self.up, self.down = nn.Linear(8, 64, bias=not norm), nn.Linear(64, 8)
        self.norm = nn.BatchNorm1d(64) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x)).exp()))


def model(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(norm) for _ in range(4)])


def data(num: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(256, 8), torch.randn(256, 8)) for _ in range(num)]


def step_of(module: nn.Module, optimizer: Any = None, **options: Any) -> OpGraph:
    loss = nn.functional.mse_loss
    return capture(module, data()[0], mode="training", loss=loss, optimizer=optimizer, **options)


def test_where_the_copies_are() -> None:
    plain, again = step_of(model()), step_of(model(), recompute=["1"])
    new = [n for n in again.op_name if n.endswith("_again")]
    # up, exp, tanh; the block's input is kept, and down's result is not read by its backward.
    kinds = [again.op_kind[again.op_name.index(n)].split(".")[1] for n in new]
    assert kinds == ["linear", "exp", "tanh"]
    first = again.op_name.index(new[0])
    assert again.is_backward[[again.op_name.index(n) for n in new]].all()
    # They follow the gradient from block 2, and block 1's backward follows them.
    before = [m for m, b in zip(again.op_module[:first], again.is_backward, strict=False) if b]
    assert {m.split(".")[0] for m in before if m} == {"3", "2"}
    sources = again.tensor_src[again.use_tensor[again.use_dst == first]]
    (waits,) = [s for s in sources if s >= 0 and again.is_backward[s]]
    assert again.op_module[waits].startswith("2")
    # One device for a call, its backward and its copy; nothing else has changed.
    original = again.op_name.index(new[0].removesuffix("_again"))
    assert again.group[first] == again.group[original]
    assert again.num_ops == plain.num_ops + 3 and again.num_groups == plain.num_groups
    assert again.param_bytes.tolist() == plain.param_bytes.tolist()


def test_less_memory_more_work() -> None:
    def peak(graph: OpGraph) -> int:
        problem = problem_of(graph, TWO, num_microbatches=1)
        return int(simulate(problem, np.zeros(graph.num_ops, np.int32)).peak_bytes[0])

    graphs = [step_of(model(), recompute=blocks) for blocks in ([], ["1"], ["0", "1", "2"])]
    bytes_of, ops = [peak(g) for g in graphs], [g.num_ops for g in graphs]
    wide = 256 * 64 * 4  # one activation of 64 features: tanh and exp keep their results
    assert bytes_of[1] <= bytes_of[0] - 2 * wide
    assert bytes_of[2] <= bytes_of[0] - 6 * wide + 3 * wide  # one block's at a time
    assert ops == [ops[0], ops[0] + 3, ops[0] + 9]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("across", [False, True])
def test_losses_and_parameters_are_those_of_plain_pytorch(norm: bool, across: bool) -> None:
    ours, theirs = model(norm), model(norm)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    graph = step_of(ours, optimizer, recompute=["0", "1", "2"])
    assert any(n.endswith("_again") for n in graph.op_name)
    placement = np.zeros(graph.num_ops, np.int32)
    if across:  # block 1 and the last on the other device
        rows = [i for i, m in enumerate(graph.op_module) if m.startswith(("1", "3"))]
        placement[np.isin(graph.group, graph.group[rows])] = 1
    with Trainer(graph, TWO, placement, optimizer) as trainer:
        for _ in range(3):
            losses = trainer.step(data())
            expected = plain_step(theirs, plain, data(), nn.functional.mse_loss)
            torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_a_gradient_inside_of_the_forward_is_not_what_the_copies_are_for() -> None:
    sentence = (Part("gradient_inside"),)
    ours, theirs = build(sentence), build(sentence)
    sgd, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    loss, steps = nn.functional.mse_loss, batches(2)
    graph = capture(ours, steps[0], mode="training", loss=loss, optimizer=sgd, recompute=["1"])
    assert "tanh_again" in graph.op_name
    with Trainer(graph, TWO, np.zeros(graph.num_ops, np.int32), sgd) as trainer:
        torch.testing.assert_close(trainer.step(steps), plain_step(theirs, plain, steps, loss))
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()])


def test_batch_normalisation_is_run_again_and_changes_its_buffers_once() -> None:
    graph = step_of(model(norm=True), recompute=["1"])
    again = [i for i, n in enumerate(graph.op_name) if "_again" in n]
    assert any("norm" in graph.op_kind[i] for i in again)
    program = graph.program
    assert not {int(graph.tensor_src[t]) for _, t in program.new_buffers} & {*again}
    # Nothing waits for statistics that it does not need.
    changed = [p for p, _ in program.new_buffers]
    readers = graph.param_use_op[np.isin(graph.param_use, changed)]
    assert not set(readers.tolist()) & {*again}


def test_what_depends_on_a_changed_buffer_is_kept() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = torch.tanh(m.inner(x)) + m.at
        m.at += 1
        return torch.exp(y)

    moves = module_of(forward, at=torch.ones(8), inner=nn.Linear(8, 8))
    graph = step_of(nn.Sequential(nn.Linear(8, 8), moves, nn.Linear(8, 8)), recompute=["1"])
    new = [graph.op_kind[i] for i, n in enumerate(graph.op_name) if "_again" in n]
    assert new and not any("add" in kind for kind in new)


def test_what_recompute_is_not_for() -> None:
    with pytest.raises(CaptureError, match=r"no module '9' to recompute; modules are 0"):
        step_of(model(), recompute=["9"])
    with pytest.raises(CaptureError, match="recompute are for training"):
        capture(model(), data()[0][0], recompute=["0"])
    dropping = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    with pytest.raises(CaptureError, match="draws random numbers"):
        step_of(dropping, recompute=["0"])
