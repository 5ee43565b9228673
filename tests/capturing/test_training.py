"""Training: gradients and updated parameters are those of plain PyTorch."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from placement.capturing import capture
from placement.capturing.training import flatten_example
from placement.capturing.training import plain_step as plain_pytorch_step
from placement.costs.measure import measure
from placement.executor import Executor, Runner, RunnerError, Trainer
from placement.plan import PlanMismatch, load_plan, make_plan
from placement.problem import Problem, Solution
from placement.program import CaptureError, InputError
from placement.schedule import Schedule, ScheduleError
from placement.simulator import list_schedule, simulate
from placement.tools.threads import torch_threads
from tests.capturing.running import values_of
from tests.machine import TWO, problem_of, random_placement
from tests.modules import module_of

training_step = partial(capture, mode="training", loss=F.cross_entropy)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


class Net(nn.Module):
    """Convolution, batch normalisation, in-place operators, views, tied and unused parameters."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.head = nn.Linear(4, 5)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)

    def forward(self, x):
        y = F.relu(self.norm(self.conv(x)), inplace=True)
        y = y.mean((2, 3)) * self.frozen
        z = y + self.one(y).tanh()
        z[:, 0] *= 2
        return self.head(self.two(z.view(-1, 4)))


def data(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(2, 3, 6, 6, generator=g), torch.randint(5, (2,), generator=g))
        for _ in range(count)
    ]


def small(seed=0):
    torch.manual_seed(seed)
    return Net()


def plain_step(module, optimizer, microbatches, loss=F.cross_entropy):
    """The same step in plain PyTorch; a module that returns its loss has none beside it.

    In one thread, as devices here have: the bias before a norm has a gradient of nothing but
    rounding, which Adam makes as large as any.
    """
    if not isinstance(microbatches[0], tuple) or isinstance(microbatches[0][1], dict):
        loss = None
    with torch_threads(1):
        return plain_pytorch_step(module, optimizer, microbatches, loss)


def beside_plain(count, name="sgd", **options):
    """A module, its copy for plain PyTorch, an optimizer of each, batches, the module's graph."""
    module, batches = small(), data(count)
    plain = copy.deepcopy(module).train()
    optimizer, expected = (OPTIMIZERS[name](m.parameters()) for m in (module, plain))
    graph = training_step(module, batches[0], optimizer=optimizer, **options)
    return module, plain, optimizer, expected, batches, graph


def assert_equal_states(module, plain):
    torch.testing.assert_close(module.state_dict(), plain.state_dict())


@pytest.mark.parametrize("colocate", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_plain_pytorch(name, colocate):
    options = {"name": name, "colocate_backward": colocate}
    module, plain, optimizer, expected, batches, graph = beside_plain(12, **options)
    seen = []

    def keep(*_):
        seen.append({n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None})

    expected.register_step_pre_hook(keep)
    with Trainer(graph, TWO, random_placement(graph, 3, 2), optimizer) as trainer:
        for i in range(3):
            mine = batches[4 * i : 4 * i + 4]
            losses = trainer.accumulate(mine)
            gradients = trainer.gradients()
            trainer.update()
            torch.testing.assert_close(losses, plain_step(plain, expected, mine))
            torch.testing.assert_close(gradients, seen[-1])
    assert_equal_states(module, plain)
    assert module.norm.num_batches_tracked == 12


# ---------------------------------------------------------------- the graph


def test_a_chain_is_numbered_weighed_and_named():
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    example = (torch.randn(5, 4), torch.zeros(5, dtype=torch.long))
    graph = training_step(module, example, optimizer=optimizer, name="chain")
    names = ["linear", "relu", "linear_1", "cross_entropy_loss"]
    assert graph.op_name == (*names, *(f"{x}_backward" for x in reversed(names)))
    assert graph.op_module == ("0", "1", "2", "", "", "2", "1", "0")
    assert graph.is_backward.tolist() == [False] * 4 + [True] * 4
    assert graph.group.tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
    assert graph.op_signature[0] == "aten.linear.default(f32[5,4], f32[3,4], f32[3])"
    assert graph.op_signature[7] == "backward of aten.linear.default(f32[5,4], f32[3,4], f32[3])"
    program = graph.program
    assert program.optimizer == "AdamW" and not program.is_random
    sizes = dict(zip(program.param_names, graph.param_bytes.tolist(), strict=False))
    assert sizes == {"0.weight": 48, "0.bias": 12, "2.weight": 24, "2.bias": 8}
    # Beside the parameters: gradient, two moments and a counter of AdamW, where gradients are.
    assert graph.param_bytes[4:].sum() == 3 * (48 + 12 + 24 + 8) + 4 * 4
    keepers = graph.param_use_op[graph.param_use >= 4]
    assert sorted({graph.op_name[op] for op in keepers}) == ["linear_1_backward", "linear_backward"]
    # The relu's result is stored for two backward operators; nothing else of the forward is.
    relu = int(graph.out_tensor[graph.out_ptr[1]])
    readers = graph.use_dst[graph.use_ptr[relu] : graph.use_ptr[relu + 1]]
    expected = ["linear_1", "linear_1_backward", "relu_backward"]
    assert [graph.op_name[op] for op in readers] == expected


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda p: torch.optim.SGD(p, lr=1.0), 0),
        (lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9), 1),
        (lambda p: torch.optim.RMSprop(p), 1),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
    ],
)
def test_memory_counts_what_the_optimizer_keeps(make, factor):
    module = nn.Linear(8, 8, bias=False)
    x, optimizer = torch.randn(2, 8), make(module.parameters())
    graph = training_step(module, (x, x), loss=F.mse_loss, optimizer=optimizer)
    weight, states = graph.param_bytes.tolist()
    counter = 4 if factor in (3,) or "RMSprop" in graph.program.optimizer else 0
    assert (weight, states) == (256, 256 * (1 + factor) + counter)


def test_backward_may_be_placed_apart():
    module, (example,) = small(), data(1)
    together = training_step(module, example)
    apart = training_step(module, example, colocate_backward=False)
    assert apart.op_name == together.op_name
    assert together.num_groups < apart.num_groups == apart.num_ops


def test_gradients_of_weights_may_be_operators_of_their_own():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    example = (torch.randn(2, 3, 6, 6), torch.tensor([0, 1]))
    graph = training_step(module, example, split_backward=True)
    backward = [name for name in graph.op_name if name.endswith("backward")]
    assert backward == [
        "cross_entropy_loss_backward",
        "linear_backward",
        "linear_weight_backward",
        "conv2d_1_backward",
        "conv2d_1_weight_backward",
        "conv2d_weight_backward",  # nobody needs the gradient of the image
    ]
    assert graph.num_groups == 4
    weights = [i for i, name in enumerate(graph.op_name) if "_weight_" in name]
    assert not np.isin(graph.tensor_src[graph.use_tensor], weights).any()
    F.cross_entropy(module(example[0]), example[1]).backward()
    _, gradients = run_in_any_order(graph, np.random.default_rng(0))
    torch.testing.assert_close(gradients, {name: p.grad for name, p in module.named_parameters()})


def run_in_any_order(graph, rng):
    """Loss and gradients, by name, of one micro-batch in a random order that the edges allow."""
    program = graph.program
    live = values_of(graph, program.example_tensors, rng)
    for t, x in live.items():  # a trace does not know the size of an LSTM's workspace
        size = x.numel() * x.element_size()
        assert graph.tensor_bytes[t] == size or "lstm" in graph.op_name[graph.tensor_src[t]]
    gradients = {program.param_names[p]: live[t] for p, t in program.gradients}
    return live[program.output_leaves[0].tensor], gradients


def branches(m, x):
    """One tensor feeds an operator directly and through another; several outputs; splits."""
    u = m.a(x).tanh()
    v = F.scaled_dot_product_attention(u, m.b(u), u) + F.cosine_similarity(u, m.b(u))[..., None]
    left, right = v.split([1, 3], -1)
    out, (h, _) = m.lstm(torch.cat([right, left], -1))
    with torch.no_grad():
        scale = out.abs().max()
    return (out / scale).sum() + h.sum() + u.detach().sum() + u.expand(2, *u.shape).mean()


def autocast(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.a(x)
    return m.b(y.float() + x).square().mean()


def strides(m, x):
    """The backward of softplus gives other strides than torch says of it; then comes a view."""
    return (F.softplus(m.linear(x.reshape(-1, 2, 2))).transpose(1, 2) * m.scale).sum()


@pytest.mark.parametrize(
    "make",
    [
        lambda: module_of(branches, a=nn.Linear(4, 4), b=nn.Linear(4, 4), lstm=nn.LSTM(4, 3)),
        lambda: module_of(autocast, a=nn.Linear(4, 4), b=nn.Linear(4, 4)),
        lambda: module_of(strides, linear=nn.Linear(2, 2), scale=nn.Parameter(torch.randn(2, 2))),
    ],
)
def test_every_order_that_the_edges_allow_gives_autograds_gradients(make):
    torch.manual_seed(0)
    module, x = make(), torch.randn(3, 4)
    graph = capture(module, x, mode="training")
    loss = module(x)
    loss.backward()
    for seed in range(5):
        got, gradients = run_in_any_order(graph, np.random.default_rng(seed))
        torch.testing.assert_close(got, loss.detach())
        expected = {name: p.grad for name, p in module.named_parameters()}
        torch.testing.assert_close(gradients, expected)


# ---------------------------------------------------------------- what a step may hold


def check_steps(module, examples, loss=None, *, seed=0, make=OPTIMIZERS["sgd"], steps=2, **options):
    """Steps on two devices against plain PyTorch, from the same parameters; the trainer's graph."""
    plain = copy.deepcopy(module).train()
    optimizer, expected = make(module.parameters()), make(plain.parameters())
    graph = capture(module, examples[0], mode="training", loss=loss, optimizer=optimizer)
    count = len(examples) // steps
    with Trainer(graph, TWO, random_placement(graph, seed, 2), optimizer, **options) as trainer:
        for i in range(steps):
            mine = examples[i * count : (i + 1) * count]
            torch.testing.assert_close(trainer.step(mine), plain_step(plain, expected, mine, loss))
    assert_equal_states(module, plain)
    return graph


def test_a_residual_network_and_a_transformer_with_tied_embeddings():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        layer_type="basic", embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=3
    )
    images = [(torch.randn(2, 3, 16, 16), torch.tensor([i % 3, 2])) for i in range(6)]
    module = transformers.ResNetForImageClassification(config)
    check_steps(module, images, lambda out, target: F.cross_entropy(out.logits, target))
    size = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    zeros = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id")
    config = transformers.GPT2Config(**size, **dict.fromkeys(zeros, 0), use_cache=False)
    texts = [{"input_ids": (x := torch.randint(20, (2, 8))), "labels": x} for _ in range(4)]
    module = transformers.GPT2LMHeadModel(config)
    graph = check_steps(module, texts, make=OPTIMIZERS["adamw"])  # its own loss, from labels
    name = graph.program.param_names.index("transformer.wte.weight")
    readers = {graph.op_name[op] for op in graph.param_use_op[graph.param_use == name]}
    assert {"embedding", "linear", "linear_backward"} <= readers
    assert sum(p == name for p, _ in graph.program.gradients) == 1


def norms(m, x):
    """Buffers that several operators read, and that change in other ways than running means."""
    y = m.still(m.norm(m.linear(x)))
    before = m.seen.exp()
    m.seen.lerp_(y.detach().mean(0), 0.5)
    return ((y * before + m.seen).square()).mean()


@pytest.mark.parametrize("seed", range(3))
def test_buffers_change_in_the_order_of_micro_batches(seed):
    torch.manual_seed(0)
    parts = {"linear": nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))}
    parts |= {"norm": nn.BatchNorm1d(4), "still": nn.BatchNorm1d(4).eval()}
    module = module_of(norms, **parts, seen=torch.zeros(4))
    module.train()
    module.still.eval()
    batches = [torch.randn(8, 4) for _ in range(16)]
    still = copy.deepcopy(module.still.state_dict())
    plain = copy.deepcopy(module)
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain))
    graph = capture(module, batches[0], mode="training")
    with Trainer(graph, TWO, random_placement(graph, seed, 2), optimizer) as trainer:
        for mine in (batches[:8], batches[8:]):
            torch.testing.assert_close(trainer.step(mine), plain_step(plain, expected, mine))
    assert_equal_states(module, plain)
    for key, value in still.items():
        if "running" in key:
            assert torch.equal(module.still.state_dict()[key], value)
    assert module.seen.abs().sum() > 0


def test_dropout_uses_one_mask_for_forward_and_backward():
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    graph = capture(module, (torch.eye(64), None), mode="training", loss=lambda y, _: y.sum())
    assert graph.program.is_random
    with Trainer(graph, TWO, random_placement(graph, 1, 2), optimizer) as trainer:
        losses = trainer.accumulate([(torch.eye(64), None)] * 2)
        gradient = trainer.gradients()["0.weight"] * 2
    # Each micro-batch gives every weight a gradient of 0 or 2, and its loss is their product.
    assert set(gradient.unique().tolist()) == {0.0, 2.0, 4.0}
    expected = (gradient * module[0].weight.detach()).sum()
    torch.testing.assert_close(losses.sum(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "result", [lambda x: x, lambda x: (x, x + 1), lambda x: {"other": 3, "loss": x}]
)
def test_the_module_may_return_its_loss(result):
    own = module_of(lambda m, x, scale=1.0: result(m.a(x).mean() * scale), a=nn.Linear(3, 1))
    check_steps(own, [((torch.randn(2, 3),), {"scale": 2.0}) for _ in range(2)], steps=1)


# ---------------------------------------------------------------- schedules and steps


def gpipe(graph, placement, count):
    """All forwards in order, then all backwards in reverse order of the micro-batches."""
    forward = [(n, b) for b in range(count) for n in np.flatnonzero(~graph.is_backward)]
    backward = [(n, b) for b in reversed(range(count)) for n in np.flatnonzero(graph.is_backward)]
    rows = np.array([*forward, *backward], np.int32)
    return Schedule(tuple(rows[placement[rows[:, 0]] == d] for d in range(2)), count)


def test_a_schedule_is_followed_step_after_step():
    module, plain, optimizer, expected, batches, graph = beside_plain(9)
    placement = random_placement(graph, 5, 2)
    schedule = gpipe(graph, placement, 3)
    with Trainer(graph, TWO, placement, optimizer, schedule=schedule, record=True) as trainer:
        for i in range(3):
            mine = batches[3 * i : 3 * i + 3]
            plain_step(plain, expected, mine)
            trainer.step(iter(mine))
        ran = np.array(trainer.runner.workers[0].slices, object).reshape(-1, 4)[:, :2].astype(int)
        order = schedule.order[0][:, ::-1]
        assert (ran == np.concatenate([order + np.array([3 * i, 0]) for i in range(3)])).all()
        with pytest.raises(RunnerError, match="2 micro-batches given, but the schedule is for 3"):
            trainer.step(batches[:2])
        before = copy.deepcopy(module.state_dict())
        trainer.step(batches[:3])  # and goes on
        assert not torch.equal(module.head.weight, before["head.weight"])


def test_a_schedule_that_changes_buffers_out_of_order_is_refused():
    module = small()
    graph = training_step(module, data(1)[0])
    placement = np.zeros(graph.num_ops, np.int32)
    rows = np.array([(n, b) for b in (1, 0) for n in range(graph.num_ops)], np.int32)
    schedule = Schedule((rows, rows[:0]), 2)
    optimizer = torch.optim.SGD(module.parameters())
    for run in (
        lambda: Trainer(graph, TWO, placement, optimizer, schedule=schedule),
        lambda: Runner(graph, TWO, placement, schedule=schedule),  # or its devices wait for ever
        lambda: simulate(problem_of(graph, TWO), placement, schedule),
    ):
        with pytest.raises(ScheduleError, match=r"micro-batch 1 .* buffer that micro-batch 0 chan"):
            run()


def test_settings_are_read_at_every_step_and_training_goes_on_where_it_stopped():
    module, plain, optimizer, expected, batches, graph = beside_plain(8, "adamw")
    for i in range(2):
        with Trainer(graph, TWO, random_placement(graph, i, 2), optimizer) as trainer:
            for j in range(2):
                mine = batches[4 * i + 2 * j : 4 * i + 2 * j + 2]
                for o in (optimizer, expected):
                    o.param_groups[0]["lr"] = 0.1 / (1 + 2 * i + j)
                trainer.step(mine)
                plain_step(plain, expected, mine)
        optimizer.load_state_dict(optimizer.state_dict())
    assert_equal_states(module, plain)
    mine = optimizer.state_dict()["state"]
    for key, value in expected.state_dict()["state"].items():
        torch.testing.assert_close(mine[key]["exp_avg_sq"], value["exp_avg_sq"])


def test_a_loader_is_read_step_by_step():
    _, plain, optimizer, expected, batches, graph = beside_plain(7)
    placement = random_placement(graph, 2, 2)
    loader = [list(x) for x in batches]  # as torch.utils.data.DataLoader gives them
    with Trainer(graph, TWO, placement, optimizer) as trainer:
        losses = list(trainer.train(loader, 3))
    assert [len(x) for x in losses] == [3, 3, 1]
    for i, got in enumerate(losses):
        mine = batches[3 * i : 3 * i + 3]
        torch.testing.assert_close(got, plain_step(plain, expected, mine))
    schedule = gpipe(graph, placement, 3)
    with Trainer(graph, TWO, placement, optimizer, schedule=schedule) as trainer:
        assert len(list(trainer.train(iter(loader), 3))) == 2


def test_what_a_data_loader_gives_is_a_list_at_any_depth():
    x = torch.ones(2, 4)
    two = module_of(lambda m, x, y: m.linear(x + y), linear=nn.Linear(4, 4))
    program = capture(two, ((x, x), x), mode="training", loss=F.mse_loss).program
    assert len(flatten_example(program, [[x, x], x])) == 3
    own = module_of(lambda m, x, y: F.mse_loss(m.linear(x), y), linear=nn.Linear(4, 4))
    plain, optimizer = copy.deepcopy(own), OPTIMIZERS["sgd"](own.parameters())
    graph = capture(own, (x, x), mode="training", optimizer=optimizer)
    batches = [*DataLoader(TensorDataset(x, x), 2)]
    with Trainer(graph, TWO, np.zeros(graph.num_ops, int), optimizer) as trainer:
        losses = trainer.step(batches)
        with pytest.raises(InputError, match="got str"):
            trainer.step(["x"])
    expected = plain_pytorch_step(plain, OPTIMIZERS["sgd"](plain.parameters()), batches, None)
    torch.testing.assert_close(losses, expected)
    assert_equal_states(own, plain)


def test_the_target_is_given_by_name_where_a_step_is_called():
    x = torch.ones(2, 4)
    program = capture(nn.Linear(4, 4), (x, x), mode="training", loss=F.mse_loss).program
    with pytest.raises(InputError, match=r"2 positional .*\(input, target\).* name: target=\.\.\."):
        program.flatten_inputs((x, x), {})
    assert len(program.flatten_inputs((x,), {"target": x})) == 2


def test_failures_leave_the_module_as_after_the_last_step():
    module, plain, optimizer, expected, batches, graph = beside_plain(4)

    def stop_early():
        yield batches[0]
        raise OSError("no more data")

    x, y = batches[1]
    with Trainer(graph, TWO, random_placement(graph, 4, 2), optimizer) as trainer:
        trainer.step(batches[:2])
        plain_step(plain, expected, batches[:2])
        buffers = {k: v.clone() for k, v in module.named_buffers()}
        for wrong, kind, message in (
            ([batches[0], (x, y + 100)], IndexError, "out of bounds"),
            ([batches[0], (x[:1], y)], InputError, "captured as f32"),
            ([x], InputError, "pair"),
            ([], RunnerError, "no micro-batches given"),
            (stop_early(), OSError, "no more data"),
        ):
            with pytest.raises(kind, match=message):
                trainer.step(wrong)
        with pytest.raises(RunnerError, match="no gradients"):
            trainer.update()
        for key, value in module.named_buffers():  # running statistics saw some micro-batches
            value.copy_(buffers[key])
        losses = plain_step(plain, expected, batches[2:])
        torch.testing.assert_close(trainer.step(batches[2:]), losses)
    assert_equal_states(module, plain)


def test_hooks_of_parameters_run_where_their_gradients_are_made():
    def where(hooked):
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).train()
        for x in module.parameters() if hooked else ():
            x.register_hook(lambda g: g.clamp(-1, 1) * 2)
        x = torch.randn(2, 4)
        graph = capture(module, (x, x), mode="training", loss=F.mse_loss)
        made = [int(graph.tensor_src[t]) for _, t in graph.program.gradients]
        return [graph.op_module[op] for op in made], graph.is_backward[made].all()

    assert where(True) == where(False) == (["0", "0", "2", "2"], True)


class FailsOnce(torch.optim.SGD):
    left = 0

    def step(self, closure=None):
        if FailsOnce.left:
            FailsOnce.left -= 1
            raise ArithmeticError("of the optimizer")
        return super().step(closure)


def test_an_update_that_fails_forgets_the_gradients(monkeypatch):
    """Which a device had divided already; and a closed trainer begins nothing."""
    module, plain, _, _, batches, graph = beside_plain(4)
    mine, expected = (FailsOnce(m.parameters(), lr=0.1) for m in (module, plain))
    with Trainer(graph, TWO, np.zeros(graph.num_ops), mine) as trainer:
        buffers = {k: v.clone() for k, v in module.named_buffers()}
        monkeypatch.setattr(FailsOnce, "left", 1)
        with pytest.raises(ArithmeticError, match="of the optimizer"):
            trainer.step(batches[:2])
        for key, value in module.named_buffers():
            value.copy_(buffers[key])
        trainer.step(batches[2:])
        plain_step(plain, expected, batches[2:])
        assert_equal_states(module, plain)
        trainer.accumulate(batches[:1])
    with pytest.raises(RunnerError, match="the runner is closed"):
        trainer.update()
    assert trainer.runner.workers == []


# ---------------------------------------------------------------- the rest of the house


@pytest.mark.usefixtures("quick_profiles")
def test_measuring_and_executing_leave_the_module_alone():
    module, *_, graph = beside_plain(1, "adamw")
    before = copy.deepcopy(module.state_dict())
    problem = Problem(graph, TWO, measure(graph, TWO, repeats=1), num_microbatches=4)
    placement = random_placement(graph, 1, 2)
    timeline = Executor(problem).run(placement, list_schedule(problem, placement, 4))
    assert timeline.num_microbatches == 4
    predicted = simulate(problem, placement)
    param_bytes = problem.param_bytes_on(placement)
    assert (predicted.peak_bytes > param_bytes).all() and (timeline.peak_bytes > param_bytes).all()
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_stored_activations_bound_the_micro_batches_in_flight():
    layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
    example = (torch.randn(4, 16), torch.randn(4, 16))
    graph = capture(nn.Sequential(*layers), example, mode="training", loss=F.mse_loss)
    placement, problem = np.zeros(graph.num_ops, np.int32), problem_of(graph, TWO)
    orders = (list_schedule(problem, placement, 4), gpipe(graph, placement, 4))
    peaks = [int(simulate(problem, placement, order).peak_bytes[0]) for order in orders]
    # The results of the 6 tanh are stored for backward, of 3 more micro-batches.
    assert peaks[1] - peaks[0] >= 3 * 6 * 4 * 16 * 4


def test_a_plan_of_a_training_step(tmp_path):
    module, plain, optimizer, expected, batches, graph = beside_plain(4)
    problem, placement = problem_of(graph, TWO, num_microbatches=2), random_placement(graph, 6, 2)
    schedule = list_schedule(problem, placement, 2)
    plan = make_plan(problem, Solution(placement, 1.0), planner="mine", schedule=schedule)
    assert (plan.graph.mode, plan.graph.optimizer) == ("training", "SGD")
    plan.save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    with plan.bind_training(module, optimizer, loss=F.cross_entropy) as trainer:
        for mine in (batches[:2], batches[2:]):
            torch.testing.assert_close(trainer.step(mine), plain_step(plain, expected, mine))
    with pytest.raises(PlanMismatch, match="bind_training"):
        plan.bind(module)
    with pytest.raises(PlanMismatch, match="parameter sizes"):
        plan.bind_training(module, torch.optim.SGD(module.parameters()), loss=F.cross_entropy)


@pytest.mark.parametrize("forward", [
    lambda self, x, target: F.mse_loss(self.layer(x), target),
    lambda self, x, *, target: F.mse_loss(self.layer(x), target),
])  # fmt: skip
def test_a_module_that_returns_its_loss_may_call_an_argument_target(forward):
    module = module_of(forward, layer=nn.Linear(4, 2)).train()
    example = {"x": torch.randn(3, 4), "target": torch.randn(3, 2)}
    graph = capture(module, example, mode="training")
    problem = problem_of(graph, TWO, num_microbatches=2)
    plan = make_plan(problem, Solution(np.zeros(graph.num_ops, np.int32), 1.0), planner="mine")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with plan.bind_training(module, optimizer) as trainer:
        (loss,) = trainer.step([example])
    assert torch.isfinite(loss)


def write_to_parameter(m, x):
    with torch.no_grad():
        m.linear.bias.add_(1)
    return m.linear(x).sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: m.linear(x), r"one floating-point number.*tensor of shape \(2, 4\)"),
        (lambda m, x: {"logits": m.linear(x)}, r"got a NoneType"),
        (lambda m, x: m.linear(x).argmax(), r"got a torch\.[a-z0-9]* tensor of shape \(\)"),
        (lambda m, x: x.sum(), r"nothing to train"),
        (lambda m, x: m.linear(x).sum().detach(), r"depends on no parameter"),
        (lambda m, x: m.linear(x.mul_(2)).sum(), r"changes its input"),
        (write_to_parameter, r"changes its parameter 'linear.bias'"),
        (lambda m, x: m.linear(x).sum() if x.sum() > 0 else x, r"Python branch"),
    ],
)
def test_what_cannot_be_trained_is_named(function, message):
    with pytest.raises(CaptureError, match=message):
        capture(module_of(function, linear=nn.Linear(4, 4)), torch.ones(2, 4), mode="training")


def test_misuse_is_explained():
    target, module, x = module_of(lambda m, target: target), nn.Linear(2, 2), torch.ones(1, 2)
    graph = training_step(module, (x, x))
    place = np.zeros(graph.num_ops, np.int32)
    sgd, lbfgs = torch.optim.SGD, torch.optim.LBFGS(module.parameters())
    other = sgd(nn.Linear(2, 2).parameters())
    with Trainer(graph, TWO, place, other) as trainer:
        for call, kind, message in (
            (lambda: capture(module, x, loss=F.mse_loss), CaptureError, "for training"),
            (lambda: capture(module, x, mode="train"), CaptureError, "'inference' or 'training'"),
            (lambda: training_step(module, x), CaptureError, r"pair \(inputs, target\)"),
            (lambda: training_step(target, (x, x)), CaptureError, "argument 'target'"),
            (lambda: training_step(module, (x, x), optimizer=sgd), CaptureError, r"<.*SGD'> is no"),
            (lambda: Trainer(graph, TWO, place, lbfgs), CaptureError, "LBFGS keeps parameters"),
            (lambda: Trainer(capture(module, x), TWO, [0], other), RunnerError, "no training step"),
            (lambda: trainer.step([(x, x)]), RunnerError, r"parameters\(\) of the captured module"),
        ):
            with pytest.raises(kind, match=message):
                call()


class Clipped(torch.optim.SGD):
    """Has a setting that no group knows, and no argument ``lr``."""

    def __init__(self, params, rate, clip):
        super().__init__(params, lr=rate)
        self.clip = clip

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.grad.clamp_(-self.clip, self.clip)
        return super().step(closure)


class ClippedByNorm(torch.optim.SGD):
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, 0.1)
        return super().step(closure)


def other_memory(module, optimizer):
    for p in module.parameters():
        p.data = p.data * 2


def other_groups(module, optimizer):
    (group,) = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": group["params"][2:4]}]


def other_state(module, optimizer):
    state = optimizer.state_dict()  # as it is now, though nobody called sync()
    assert state["state"]
    for of_one in state["state"].values():
        of_one["exp_avg"] = of_one["exp_avg"] * 3
    optimizer.load_state_dict(state)


def a_step_of_plain_pytorch(module, optimizer):
    plain_step(module, optimizer, data(1, seed=1))


@pytest.mark.parametrize(
    "change", [other_memory, other_groups, other_state, a_step_of_plain_pytorch]
)
def test_what_changes_between_steps_counts_in_the_next(change):
    module, plain, optimizer, expected, batches, graph = beside_plain(4, "adamw")
    with Trainer(graph, TWO, random_placement(graph, 0, 2), optimizer) as trainer:
        for i, batch in enumerate(batches):
            if i == 2:
                change(module, optimizer)
                change(plain, expected)
            trainer.step([batch])
            plain_step(plain, expected, [batch])
    assert_equal_states(module, plain)


@pytest.mark.parametrize("first", [True, False])
def test_a_step_may_be_taken_where_gradients_are_off(first):
    _, plain, optimizer, expected, batches, graph = beside_plain(4, "adamw")
    with Trainer(graph, TWO, random_placement(graph, 0, 2), optimizer) as trainer:
        for i, batch in enumerate(batches):
            with torch.inference_mode((i < 2) == first):
                loss = trainer.step([batch])
            torch.testing.assert_close(loss * 1, plain_step(plain, expected, [batch]))


def test_a_loss_of_one_element_is_a_number():
    module = nn.Linear(2, 2)
    batch = (torch.ones(1, 2), torch.ones(1, 2))

    def loss(output, target):
        return F.mse_loss(output, target).reshape(1)

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    graph = capture(module, batch, mode="training", loss=loss, optimizer=optimizer)
    with Trainer(graph, TWO, np.zeros(graph.num_ops, int), optimizer) as trainer:
        assert trainer.step([batch] * 3).shape == (3,)
    assert plain_step(module, optimizer, [batch] * 3, loss).shape == (3,)


def test_an_optimizer_keeps_its_attributes_and_its_scheduler_sees_its_steps(recwarn):
    module, plain, _, _, batches, graph = beside_plain(4)
    mine, expected = (Clipped(m.parameters(), rate=0.1, clip=1e-3) for m in (module, plain))
    scheduler = torch.optim.lr_scheduler.StepLR(mine, 1, 0.5)
    with Trainer(graph, TWO, random_placement(graph, 0, 2), mine) as trainer:
        for batch in batches:
            trainer.step([batch])
            scheduler.step()
            plain_step(plain, expected, [batch])
            expected.param_groups[0]["lr"] /= 2
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]
    assert_equal_states(module, plain)


class Slower(torch.optim.SGD):
    """The k-th step is a k-th as long; k is a setting of a group."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for x in (x for x in group["params"] if x.grad is not None):
                x.data.sub_(x.grad, alpha=group["lr"] / group["k"])


def test_an_optimizer_may_count_in_its_groups():
    module, plain, _, _, batches, graph = beside_plain(4)
    mine, expected = (Slower(m.parameters(), lr=0.1) for m in (module, plain))
    with Trainer(graph, TWO, random_placement(graph, 0, 2), mine) as trainer:
        for batch in batches:
            trainer.step([batch])
            plain_step(plain, expected, [batch])
        assert mine.param_groups[0]["k"] == expected.param_groups[0]["k"] == 4
    assert_equal_states(module, plain)


def test_what_is_done_to_gradients_before_the_update_counts():
    module, plain, optimizer, expected, batches, graph = beside_plain(8, "adamw")
    clip = partial(nn.utils.clip_grad_norm_, max_norm=1e-2)
    norms = []
    expected.register_step_pre_hook(lambda *_: norms.append(clip(plain.parameters())))
    with Trainer(graph, TWO, random_placement(graph, 0, 2), optimizer) as trainer:
        for i in (0, 4):
            trainer.accumulate(batches[i : i + 1])
            trainer.accumulate(batches[i + 1 : i + 4])
            norm = clip(module.parameters())
            assert norm > 0.01 and sum(g.square().sum() for g in trainer.gradients().values()) < 1
            trainer.update()
            plain_step(plain, expected, batches[i : i + 4])
            torch.testing.assert_close(norm, norms[-1])
        assert_equal_states(module, plain)
        for to_none in (True, False):
            trainer.accumulate(batches[:1])
            optimizer.zero_grad(set_to_none=to_none)
            with pytest.raises(RunnerError, match="there are no gradients"):
                trainer.update()
            optimizer.zero_grad()
        trainer.accumulate(batches[:2])
        of_two = trainer.gradients()
        for x in module.parameters():
            x.grad = None if x.grad is None else x.grad * 3
        trainer.accumulate(batches[2:3])
        of_three = trainer.gradients()
        optimizer.zero_grad()
        trainer.accumulate(batches[2:3])
        for key, one in trainer.gradients().items():
            torch.testing.assert_close(of_three[key], (6 * of_two[key] + one) / 3)
        param = graph.program.params[graph.program.gradients[0][0]]
        param.grad = None
        with pytest.raises(RunnerError, match=r"has lost the \.grad that trainer\.accumulate"):
            trainer.update()
    assert all(x.grad is None for x in module.parameters())


def test_what_a_step_cannot_follow_is_refused():
    module, _, optimizer, _, batches, graph = beside_plain(1)
    place = random_placement(graph, 0, 2)
    with pytest.raises(RunnerError, match="ClippedByNorm changes a parameter by what the grad"):
        Trainer(graph, TWO, place, ClippedByNorm(module.parameters(), lr=0.1))
    optimizer.inner = torch.optim.SGD(module.parameters())  # as Lookahead has
    with pytest.raises(CaptureError, match=r"SGD keeps parameters beside its groups \(in 'inner'"):
        Trainer(graph, TWO, place, optimizer)
    del optimizer.inner
    param = graph.program.params[graph.program.gradients[0][0]]
    param.requires_grad_(False)  # since the capture
    with Trainer(graph, TWO, place, optimizer) as trainer:
        with pytest.raises(RunnerError, match="has requires_grad=False now, but the step was"):
            trainer.step(batches)
        param.requires_grad_(True)
        trainer.step(batches)
        param.requires_grad_(False)
        with pytest.raises(RunnerError, match="has requires_grad=False now, but the step was"):
            trainer.step(batches)
        param.requires_grad_(True)
        for x in (param, module.unused.weight):
            x.grad = torch.ones_like(x)
            with pytest.raises(RunnerError, match=r"has a \.grad.*optimizer\.zero_grad\(\)"):
                trainer.step(batches)
            optimizer.zero_grad()
        param.grad = torch.zeros_like(param)  # as zero_grad(set_to_none=False) leaves it
        trainer.step(batches)
        trainer.accumulate(batches)
        with pytest.raises(RunnerError, match=r"has the gradients of 1 micro.*trainer\.update\(\)"):
            optimizer.step()
        trainer.update()
        optimizer.step()  # of plain PyTorch in between
        hook = optimizer.register_step_post_hook(print)
        with pytest.raises(RunnerError, match="has a hook on its step, which would not run"):
            trainer.step(batches)
        hook.remove()
        module.double()
        with pytest.raises(RunnerError, match=r"is torch.float64 of shape .* now"):
            trainer.step(batches)
