"""What people brought and what came out wrong, one section a kind: each with the right value."""

from __future__ import annotations

import copy
import json
import random
import re
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from placement import OpGraph, Problem, Runner, Trainer, capture, exporters, importers
from placement.capturing.training import plain_step
from placement.cluster import Cluster, Device
from placement.exporters import ExportError, Inexpressible, moved
from placement.nearest import simulate_split
from placement.planners import load
from placement.program import CaptureError, run_program
from placement.runs.ways import first_difference
from placement.search.evaluation import cannot_fit
from placement.simulator import score, simulate
from tests import consumers
from tests.machine import random_placement
from tests.module_grammar import WIDTH, Part, batches, build, leaf, parts
from tests.modules import module_of
from tests.problems import (
    altered,
    chain,
    every_placement,
    problem_on,
    random_problem,
    small_problem,
    written,
)

TWO = Cluster("two", (Device("cpu:0"), Device("cpu:1")))

# --- training ------------------------------------------------------------------------------------


def trained(module: nn.Module, plain: nn.Module) -> OpGraph:
    """The captured step; two steps on a random placement end where plain PyTorch's do."""
    batches_of, loss = batches(4), nn.functional.mse_loss
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer, expected = sgd(module.parameters()), sgd(plain.parameters())
    graph = capture(module, batches_of[0], mode="training", loss=loss, optimizer=optimizer)
    with Trainer(graph, TWO, random_placement(graph, 1, 2), optimizer) as trainer:
        for mine in (batches_of[:2], batches_of[2:]):
            got, wanted = trainer.step(mine), plain_step(plain, expected, mine, loss)
            torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(module.state_dict(), plain.state_dict())
    return graph


@pytest.mark.parametrize(
    "part",
    [
        *map(Part, ("reverse", "round", "split", "double")),
        *map(Part, ("hooked", "gradient_inside", "inferred", "round_data")),
        Part("checkpoint", (Part("split"), Part("reverse"))),
        Part("reentrant", (Part("hooked"), Part("round"))),
        Part("twice", (Part("double"), Part("gradient_inside"))),
    ],
)
def test_a_backward_is_the_users_own(part: Part) -> None:
    trained(build((part,)), build((part,)))


class Reversible(torch.autograd.Function):
    """Keeps no activation: computes the input again, and adds to gradients by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        y = torch.cat([a, b + layer(a)], -1)
        ctx.layer = layer
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, _ = ctx.saved_tensors[0].chunk(2, -1)
        of_a, of_b = grad.chunk(2, -1)
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            ctx.layer(a).backward(of_b)
        return torch.cat([of_a + a.grad, of_b], -1), None


def test_a_function_may_hold_a_module_and_add_to_gradients() -> None:
    module = leaf(lambda m, x: Reversible.apply(m.linear(x), m.inner))()
    module.inner = nn.Sequential(nn.Linear(WIDTH // 2, WIDTH // 2), nn.Tanh())
    trained(module, copy.deepcopy(module))


def test_hooks_of_a_parameter_see_each_gradient_of_a_micro_batch() -> None:
    mask = torch.rand(WIDTH, WIDTH).round()
    pair = [build(()) for _ in range(2)]
    for module in pair:
        module[0].weight.register_hook(lambda grad: (grad * mask).clamp(-0.01, 0.01))
    trained(*pair)


@pytest.mark.parametrize("training", [True, False])
def test_submodules_keep_their_own_mode(training: bool) -> None:
    norm, drop = nn.BatchNorm1d(WIDTH).eval(), nn.Dropout(0.5).eval()
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, drop, nn.BatchNorm1d(WIDTH))
    module[3].train(training)
    plain = copy.deepcopy(module)
    before = [m.training for m in module.modules()]
    graph = trained(module, plain)
    assert [m.training for m in module.modules()] == before
    assert graph.program is not None and not graph.program.is_random
    changed = {graph.program.param_names[p] for p, _ in graph.program.new_buffers}
    assert all(name.startswith("3.") for name in changed) and bool(changed) == training


def keeping(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    positive = (y > 0).float()
    y.register_hook(lambda grad: grad * positive)
    return y


def of_graph(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y.grad_fn.register_prehook(lambda grads: tuple(g * 2 for g in grads))
    return y


def rounded(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.round, lambda x: x):
        return m.linear(x).tanh()


def sent_back(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y.sum().backward(retain_graph=True)
    return y


def frozen_late(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.weight.requires_grad_(False)
    return m.linear(x) * m.weight


def assigned(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y.data = y.data.clamp(0, 1)
    return y


def transformed(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda y: m.linear(y).tanh().sum())(x)


def same_memory(m: Any) -> None:
    m.other = nn.Parameter(m.linear.weight.data.t())


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        (keeping, None, "hook.* holds a tensor that the forward made"),
        (of_graph, None, r"grad_fn is read.*test_cases\.py:\d+ `y\.grad_fn"),
        (lambda m, x: nn.Linear(WIDTH, 4)(m.linear(x)), None, "a parameter is made while"),
        (rounded, None, r"saved_tensors_hooks.*test_cases\.py:\d+ `with"),
        (sent_back, None, r"backward\(\) is called.*test_cases\.py:\d+ `y\.sum"),
        (frozen_late, None, r"requires_grad of a parameter.*test_cases\.py:\d+ `m\.weight"),
        (assigned, None, r"data is assigned to.*test_cases\.py:\d+ `y\.data"),
        (transformed, None, r"torch\.func.*test_cases\.py:\d+ `return"),
        (
            lambda m, x: m.linear(x),
            lambda m: m.linear.register_full_backward_hook(lambda *_: None),
            r"module 'linear' \(Linear\) has a backward hook",
        ),
        (
            lambda m, x: m.linear(x) @ m.other,
            same_memory,
            "'other' and 'linear.weight' are two tensors in the same memory",
        ),
        (
            lambda m, x: checkpoint(m.norm, m.linear(x), use_reentrant=False),
            lambda m: setattr(m, "norm", nn.BatchNorm1d(WIDTH)),
            "'norm.running_mean' changes in a checkpoint.*recompute=",
        ),
        (
            lambda m, x: m.norm(m.linear(x)),
            lambda m: setattr(m, "norm", nn.BatchNorm1d(WIDTH, momentum=None)),
            r"`lambda m, x: m\.norm.* in module 'norm', BatchNorm1d\(.*momentum=None",
        ),
    ],
)
def test_what_a_trace_of_autograd_would_lose_is_named(function, change, message):
    module = leaf(function)()
    if change is not None:
        change(module)
    with pytest.raises(CaptureError, match=message) as caught:
        capture(module, batches(1)[0], mode="training", loss=nn.functional.mse_loss)
    assert "\n" not in str(caught.value) and "placement/" not in str(caught.value)


# --- capture -------------------------------------------------------------------------------------


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def of(function: Any, **parts: Any) -> nn.Module:
    def forward(self: Any, *inputs: Any) -> Any:  # torch records lines of what is called so
        return function(self, *inputs)

    return module_of(forward, linear=nn.Linear(4, 4), **parts)


def assert_placed_as_called(module: nn.Module, *calls: tuple[Any, ...]) -> OpGraph:
    """A random placement of the module, captured with the first call, gives what each call does."""
    graph = capture(module, calls[0])
    with Runner(graph, TWO, random_placement(graph, 0, 2)) as runner, torch.no_grad():
        for inputs in calls:
            torch.testing.assert_close(runner(*inputs), module(*inputs), equal_nan=True)
    return graph


def padding(*lengths: int) -> torch.Tensor:
    return torch.arange(5) >= torch.tensor(lengths)[:, None]


PADDINGS = [padding(5, 5, 5), padding(5, 3, 1), padding(5, 3, 1).flip(1), padding(0, 5, 2)]


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize(
    ("layer", "encoder"),
    [
        ({}, {}),
        ({"activation": "gelu"}, {"norm": nn.LayerNorm(8)}),
        ({"nhead": 1}, {}),
        ({}, {"enable_nested_tensor": False}),
    ],
)
def test_padded_positions_are_those_of_the_call(layer: Any, encoder: Any) -> None:
    """A call makes zeros of them in torch's fast path, if they are at the ends: a trace does not.

    Which path a call takes depends on the mask, also on another one than the example's.
    """
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)
    masks = PADDINGS[:3] if encoder.get("enable_nested_tensor") is False else PADDINGS
    kind = {"d_model": 8, "nhead": 2, "dim_feedforward": 8, "batch_first": True, **layer}
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(**kind), 2, **encoder)
    tagger = of(lambda m, x, padding: m.inner(x, src_key_padding_mask=padding), inner=layers)
    assert_placed_as_called(tagger.eval(), *((x, mask) for mask in masks))


def test_a_frozen_encoder_trains_as_it_is_called() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    module = module_of(
        lambda m, x: m.head(m.encoder(x, src_key_padding_mask=PADDINGS[1])).mean(1),
        encoder=nn.TransformerEncoder(layer, 1).requires_grad_(False).eval(),
        head=nn.Linear(4, 2),
    )
    x, target = torch.randn(3, 5, 4), torch.randn(3, 2)
    loss = nn.functional.mse_loss
    program = capture(module, (x, target), mode="training", loss=loss).program
    torch.testing.assert_close(run_program(program, [x, target])[0], loss(module(x), target))


def vmapped(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda row, scale: m.linear(row) * scale)(x, x.cos())


def in_regions(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        y = m.inner(m.linear(x).relu())
        y.mul_(2)
    return y.float()


@pytest.mark.parametrize(
    ("function", "modules"),
    [
        (vmapped, {"", "linear"}),
        (in_regions, {"", "linear", "inner"}),
        (lambda m, x: torch.func.jvp(m.linear, (x,), (x.sin(),))[1], {"", "linear"}),
        (lambda m, x: torch.func.functional_call(m.inner, {"bias": x[0]}, x), {"", "inner"}),
        (lambda m, x: torch.distributions.Normal(m.linear(x), 2).log_prob(x), {"", "linear"}),
        (lambda m, x: nn.GaussianNLLLoss()(m.linear(x), x, x.exp()), {"", "linear"}),
    ],
)
def test_regions_and_transforms_are_plain_operators_of_their_modules(function, modules):
    graph = assert_placed_as_called(of(function, inner=nn.Linear(4, 4)).eval(), (X,), (X * 2,))
    assert set(graph.op_module) == modules


SPARSE = torch.eye(4).to_sparse()
GLOBAL = [0]


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return m.linear(x) * m.calls


def counted_elsewhere(m: Any, x: torch.Tensor) -> torch.Tensor:
    GLOBAL[0] += 1
    return m.linear(x) * GLOBAL[0]


def asks(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x) if torch.compiler.is_exporting() else m.linear(x) * 2


def asks_for_the_type(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x) if type(x) is torch.Tensor else m.linear(x) * 2


def packed(m: Any, x: torch.Tensor) -> Any:
    return m.inner(nn.utils.rnn.pack_sequence([x, x[:2]]))[1]


def own_generator(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.linear(x) + torch.rand(3, 4, generator=torch.Generator().manual_seed(0))


def flexible(m: Any, x: torch.Tensor) -> Any:
    return flex_attention(x[None, None], x[None, None], m.linear(x)[None, None])


def with_quantised_weights() -> nn.Module:
    inner = nn.Sequential(nn.Linear(4, 4)).eval()
    packed = torch.ao.quantization.quantize_dynamic(inner, {nn.Linear}, dtype=torch.qint8)
    return of(lambda m, x: m.inner(x), inner=packed)


def with_a_quantised_buffer() -> nn.Module:
    buffer = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    return of(lambda m, x: x + m.a.dequantize(), a=buffer)


def alignment(m: Any, x: torch.Tensor) -> torch.Tensor:
    likely = m.linear(x).log_softmax(-1)[:, None]
    return nn.functional.ctc_loss(likely, torch.tensor([[1, 2]]), (3,), (2,))


def nested(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([m.linear(x), x[:1]]).to_padded_tensor(0.0)


HERE = r"test_cases\.py:\d+ `"
DERIVATIVES = rf"derivatives at .*{HERE}.*write the derivative out|uses torch\.func"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (of(lambda m, x: m.a @ x.t(), a=SPARSE), (X,), "buffer 'a' is a sparse tensor.*to_dense"),
        (of(lambda m, x: m.a @ x.t(), a=SPARSE.to_sparse_csr()), (X,), "buffer 'a' is a sparse"),
        (of(lambda m, x: SPARSE @ x.t()), (X,), "constant .* is a sparse tensor"),
        (of(lambda m, x: m.linear(x).to_sparse()), (X,), rf"aten\.to_sparse.*{HERE}.* sparse"),
        (of(lambda m, a, x: a @ x.t()), (SPARSE, X), "input 'inputs_0' is a sparse tensor"),
        (with_quantised_weights, (X,), "'inner.0._packed.*quantised"),
        (with_a_quantised_buffer, (X,), "buffer 'a' is a quantised tensor"),
        (lambda: of(lambda m, x: m.a(x), a=torch.jit.script(nn.ReLU())), (X,), "'a' .*Script"),
        (of(flexible), (X,), "construct 'flex_attention'.*plain implementation"),
        (of(own_generator), (X,), "uses a torch._C.Generator"),
        (of(packed, inner=nn.GRU(4, 4)), (X,), rf"packed sequences at .*{HERE}return m\.inner"),
        (of(nested), (X,), rf"cannot trace nested tensors at .*{HERE}"),
        (of(transformed), (X,), DERIVATIVES),
        (of(alignment), (X,), rf"_ctc_loss.* gives a shape that depends on the values.*{HERE}"),
        (of(counted), (X,), "two calls .* other numbers: it keeps 'calls' between them"),
        (of(counted_elsewhere), (X,), "two calls .* other numbers: it counts them"),
        (of(lambda m, x: m.linear(x) * random.random()), (X,), "two calls .* other numbers"),
        (nn.Sequential(of(asks)), (X,), rf"first in module '0'.*whether it is traced at .*{HERE}"),
        (of(asks_for_the_type), (X,), "other numbers when it is called.*type of a tensor"),
        (of(lambda m, x: m.linear(x) if x.sum() > 0 else x), (X,), f"branch.*{HERE}"),
    ],
)
def test_what_no_graph_can_hold_is_named(module: Any, inputs: Any, message: str) -> None:
    module = module if isinstance(module, nn.Module) else module()
    with pytest.raises(CaptureError, match=message) as caught:
        capture(module, inputs)
    text = str(caught.value)
    assert not re.search(r"\n|site-packages/torch|contextlib.py|sympy|capturing/exported.py", text)


def test_a_lazy_module_is_named_and_left_as_it_was() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).eval()
    for inputs, how in ((X, {}), ((X, X[:, :3]), {"mode": "training", "loss": torch.dist})):
        with pytest.raises(CaptureError, match=r"^'0\.weight' has no shape yet: call the module"):
            capture(lazy, inputs, **how)
    lazy(X)
    assert_placed_as_called(lazy, (X,))


def test_results_are_written_to_and_trained_on_as_those_of_a_call() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.linear(x)
        return y, y.t(), torch.complex(y, x).conj(), m.linear.bias, x

    graph, head = capture(of(forward).eval(), X), nn.Linear(4, 2)
    with Runner(graph, TWO, np.arange(graph.num_ops) % 2) as runner:
        first, *rest = runner(X)
        head(first).sum().backward()
        again, turned, *_ = runner(X)
        again += 1
        assert torch.equal(again.t(), turned)  # one memory, as in a call
        assert not any(x.is_inference() for x in (first, *rest))
        with torch.inference_mode():
            torch.testing.assert_close([*runner(X)], [first, *rest])


def test_what_is_not_used_may_be_of_any_kind() -> None:
    assert_placed_as_called(of(lambda m, x: m.linear(x), a=SPARSE).eval(), (X,))


@pytest.mark.filterwarnings("ignore")
def test_the_fast_path_is_named_where_only_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some number that only the fast path gives."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: fast(*a) + 1)
    with pytest.raises(CaptureError, match=r"set_fastpath_enabled\(False\)"):
        capture(layer, torch.randn(3, 5, 8))


def test_a_run_whose_results_differ_names_the_operator() -> None:
    @torch.library.custom_op("test_cases::by_thread", mutates_args=())
    def by_thread(x: torch.Tensor) -> torch.Tensor:
        return x + (threading.current_thread() is not threading.main_thread())

    by_thread.register_fake(torch.empty_like)
    graph = capture(of(lambda m, x: by_thread(m.linear(x).relu_()) * 2).eval(), X)
    with Runner(graph, TWO, np.ones(graph.num_ops, int)) as runner:
        difference = first_difference(runner, X)
    assert "first in operator 'by_thread' (module '') on 'cpu:1'" in difference


def test_a_model_without_submodules_is_not_called_old() -> None:
    p = consumers.problem_of(capture(nn.Linear(4, 4).eval(), X))
    with pytest.raises(ExportError, match="no operator of 'Linear' is in a submodule"):
        exporters.load("huggingface")(consumers.placed(p, np.zeros(p.num_ops, int)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.pt2", b"PK\x03\x04\xff", "weights, an exported program"),
        ("m.pt", b"\x80\x02}q\x00.", "a pickle"),
        ("mine.py", b"import torch", "Python code.*placement plan mine:function"),
        ("m.json", b'{"hello": 1}', "unknown JSON format"),
    ],
)
def test_files_of_models_are_named_for_what_they_are(tmp_path, name, content, message):
    with pytest.raises(importers.FormatError, match=message):
        importers.load(written(tmp_path / name, content), devices=2)


def padded() -> nn.Module:
    """An encoder over three positions, of which some are padding."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        padding = torch.arange(3) >= 1 + (x[:, :1] > 0) + (x[:, :1] > 1)
        return m.encoder(x.view(-1, 3, 2), src_key_padding_mask=padding).flatten(1)

    layer = nn.TransformerEncoderLayer(2, 2, 4, batch_first=True)
    return module_of(forward, encoder=nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(2)))


def aliased(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.linear(x)
    y.view(-1)[::2] += 1
    rows = y.t()
    y.relu_()
    return rows.t() + y


def half(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (m.linear(x) * m.weight).float()


ALSO = {
    "nothing": nn.Identity,
    "asks": leaf(lambda m, x: x if torch.compiler.is_compiling() else x + 1),  # as some models do
    "padded": padded,
    "aliased": leaf(aliased),
    "half": leaf(half),
    "vmapped": leaf(vmapped),
    "changes its input": leaf(lambda m, x: x.mul_(2)),
}


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(parts(), st.sampled_from(sorted(ALSO)), st.sampled_from(sorted(ALSO)))
def test_random_modules_run_as_they_are_called(sentence, first, last):
    torch.manual_seed(0)
    module = nn.Sequential(ALSO[first](), build(sentence), ALSO[last]()).eval()
    (x, _), (y, _) = batches(2)
    try:
        graph = capture(module, x.clone())
    except CaptureError as error:
        assert "torch.export cannot trace the module:" not in str(error)  # by name, or with a line
        return
    with Runner(graph, TWO, random_placement(graph, 0, 2)) as runner, torch.no_grad():
        for z in (x, y):
            torch.testing.assert_close(runner(z.clone()), module(z.clone()), equal_nan=True)


# --- exports -------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parts in a row or beside each other, which it adds, concatenates, or multiplies itself."""

    def __init__(self, how: str, *parts: nn.Module) -> None:
        super().__init__()
        self.how, self.parts = how, nn.ModuleList(parts)
        self.scale = nn.Parameter(torch.ones(())) if how == "scale" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "split":
            return torch.stack([part(x) for part in self.parts]).sum(0)
        y = x
        for part in self.parts:
            y = part(y).tanh()
        if self.how == "row":
            return y
        if self.how == "scale":
            return self.scale * y
        return x + y if self.how == "add" else x.to(x.dtype) * y


def mixed(rows: Any) -> nn.Module:
    """A module from nested lists: a number is a layer, a list is how its parts are mixed."""
    if isinstance(rows, int):
        return [nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.1), nn.ReLU()][rows]
    return Mixed(rows[0], *map(mixed, rows[1]))


HOW = st.sampled_from(["row", "add", "times", "split", "scale"])
INNER = lambda inner: st.tuples(HOW, st.lists(inner, min_size=1, max_size=3))  # noqa: E731
MIXED = st.recursive(st.integers(0, 3), INNER, max_leaves=8)


@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate])
@example([0, 0], "add", 0)
@example([("row", [3, 3]), ("row", [3, 0])], "times", 1)
@given(st.lists(MIXED, min_size=2, max_size=4), st.sampled_from(["row", "add"]), st.integers(0, 99))
def test_any_device_map_runs_in_accelerate(rows: list[Any], how: str, seed: int) -> None:
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    module, x = Mixed(how, nn.Linear(4, 4), *map(mixed, rows)).eval(), torch.randn(2, 4)
    p = consumers.problem_of(capture(module, x))
    random = np.random.default_rng(seed)
    cut = np.arange(p.num_ops) >= random.integers(1, p.num_ops)
    for on in (cut, random.integers(2, size=p.num_ops), random.integers(2, size=p.num_ops)):
        plan, exporter = consumers.placed(p, on), exporters.load("huggingface")
        try:
            text = exporter(plan).files[""]
        except Inexpressible as error:
            text = exporter(moved(plan, error.nearest)).files[""]
        for main in (None, "cuda:0"):  # where the map says, or where most people bring inputs
            with pytest.MonkeyPatch.context() as patch, torch.no_grad():
                expected = module(x)
                again = Mixed(how, nn.Linear(4, 4), *map(mixed, rows)).eval()
                again.load_state_dict(module.state_dict())
                where = json.loads(text)
                results = consumers.run_in_accelerate(again, where, (x,), {}, patch, main)
            assert torch.equal(results[0], expected)


class Turned(nn.Linear):
    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x * turn.unsqueeze(0)[0])


def layered_problem(num_layers: int) -> Problem:
    """Of a decoder whose layers all take a view of one tensor, as rotary embeddings are."""

    def forward(m: Any, ids: torch.Tensor) -> torch.Tensor:
        x = m.embed(ids)
        turn = (x * 2).cos()
        for layer in m.layers:
            x = layer(x, turn)
        return m.head(x)

    layers = nn.ModuleList(Turned(8, 8) for _ in range(num_layers))
    module = module_of(forward, embed=nn.Embedding(20, 8), layers=layers, head=nn.Linear(8, 20))
    graph = capture(module.eval(), torch.randint(20, (1, 4)))
    some = {"memory_bytes": 10**9, "link": (2e-5, 1e10), "num_microbatches": 8}
    gpus = {"devices": "cuda:{}", "device": {"kind": "cuda"}}
    return problem_on(graph, np.full((graph.num_ops, 3), 1e-3), **gpus, **some)


@pytest.mark.parametrize("name", ["vllm", "megatron", "torchtitan", "huggingface", "llama_cpp"])
def test_the_nearest_plan_is_the_best_of_whole_layers(name: str) -> None:
    """14, 2 and 2 layers, and one of those cut: far from even, which few moves would keep."""
    p = layered_problem(18)
    path = [m.split(".") for m in p.graph.op_module]
    layer = np.array([int(m[1]) if m[0] == "layers" else -1 for m in path])
    layer[np.maximum.accumulate(layer) < 0] = 0
    layer = np.maximum.accumulate(layer)
    plan = consumers.placed(p, (layer > 13).astype(int) + (layer > 15))
    with pytest.raises(Inexpressible) as error:
        exporters.load(name)(plan, p)
    exporters.load(name)(moved(plan, error.value.nearest), p)
    on = [p.cluster.index(d) for d in error.value.nearest.values()]
    free = replace(p, graph=replace(p.graph, group=np.arange(p.num_ops)))
    best = load("contiguous_dp")(free).value_s
    assert simulate_split(p, on).period_s <= 1.15 * best


def test_views_that_are_split_are_simulated_as_copies() -> None:
    """Else the nearest plan of a model with rotary embeddings is checked against no limit."""
    p = layered_problem(2)
    whole = np.zeros(p.num_ops, np.int32)
    one, free = simulate(p, whole), simulate_split(p, whole)
    assert (one.period_s, one.peak_bytes.tolist()) == (free.period_s, free.peak_bytes.tolist())
    last = np.array(["layers.1" in m or m == "head" for m in p.graph.op_module], np.int32)
    assert (simulate_split(p, last).peak_bytes[:2] > 0).all()


@pytest.mark.parametrize(("how", "why"), [("input", "reads an input"), ("output", "an output")])
def test_pipelining_refuses_what_torch_cannot_run(how: str, why: str) -> None:
    """The last layer reads the model's own input again; or an early layer makes an output."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        outs = [x]
        for layer in m.layers:
            outs.append(layer(outs[-1]).tanh())
        return m.layers[3](x + outs[3]) if how == "input" else (outs[4], outs[1])

    module = module_of(forward, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4))).eval()
    p = consumers.problem_of(capture(module, torch.randn(2, 4)), ("cpu:0", "cpu:1"))
    plan = consumers.placed(p, np.arange(p.num_ops) >= p.graph.op_module.index("layers.2"))
    with pytest.raises(Inexpressible, match=why) as error:
        exporters.load("torch_pipelining")(plan)
    files = exporters.load("torch_pipelining")(moved(plan, error.value.nearest)).files
    points = json.loads(files[".json"])["split_points"]
    assert not {"layers.2", "layers.3"} & {*points}


# --- ONNX and tight memory -----------------------------------------------------------------------


def _onnx(tmp_path: Path, nodes: Any, x: Any, y: Any, opset: int = 17, declared: Any = ()) -> Path:
    """A model of one input x and one output y, with weights w of 4 kernels of 3x3x3."""
    onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")
    h, array = onnx.helper, onnx.numpy_helper.from_array

    def value(name: str, shape: list[Any]) -> Any:
        return h.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)

    weights = [array(np.zeros((4, 3, 3, 3), np.float32), "w"), array(np.int64(3), "three")]
    weights += [array(np.float32(0), "zero"), array(np.float32(1), "one")]
    ops = [h.make_node(op, reads, writes, **options) for op, reads, writes, options in nodes]
    inside = [value(name, shape) for name, shape in declared]
    ends = [value("x", x)], [value("y", y)]
    graph = h.make_graph(ops, "g", *ends, weights, value_info=inside)
    path = tmp_path / "model.onnx"
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", opset)]), path)
    return path


def test_sizes_that_a_tool_left_behind_are_neither_asked_for_nor_believed(tmp_path: Path) -> None:
    stale = "floor((width - 1)/2) + 1"
    nodes = [
        ("Conv", ["x", "w"], ["a"], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("Shape", ["a"], ["s"], {}),
        ("Gather", ["s", "three"], ["n"], {"axis": 0}),
        ("Cast", ["n"], ["f"], {"to": 1}),
        ("Range", ["zero", "f", "one"], ["grid"], {}),
        ("Add", ["a", "grid"], ["y"], {}),
    ]
    declared = [("a", ["batch", 4, "rows", 9]), ("grid", [stale])]
    path = _onnx(tmp_path, nodes, ["batch", 3, "height", "width"], ["batch"], declared=declared)
    sizes = {"batch": 2, "height": 16, "width": 32}
    bytes_ = [2 * 3 * 16 * 32 * 4, 2 * 4 * 8 * 16 * 4, 4 * 8, 8, 4, 16 * 4, 2 * 4 * 8 * 16 * 4]
    assert importers.load(path, dims=sizes).graph.tensor_bytes.tolist() == bytes_
    with pytest.raises(importers.FormatError, match=r"= 1 contradicts the size of 'grid'.* is 16"):
        importers.load(path, dims={**sizes, stale: 1})
    with pytest.raises(importers.FormatError, match=r"'x' has no size on axis 3.*--dim width=1"):
        importers.load(path, dims={"batch": 2, "height": 16})


@pytest.mark.parametrize("unsaid", [-1, 0, "?", "", None])
def test_any_size_is_set_by_tensor_and_axis(tmp_path: Path, unsaid: Any) -> None:
    nodes = [("Conv", ["x", "w"], ["y"], {})]
    path = _onnx(tmp_path, nodes, [unsaid, 3, 8, unsaid], [unsaid, 4, 6, unsaid])
    with pytest.raises(importers.FormatError, match=r"axis 0; set it: --dim x\.0=1"):
        importers.load(path, dims={"x.3": 9})
    graph = importers.load(path, dims={"x.0": 2, "x.3": 9}).graph
    assert graph.tensor_bytes.tolist() == [2 * 3 * 8 * 9 * 4, 2 * 4 * 6 * 7 * 4]


def test_an_output_that_nothing_reads_needs_no_size(tmp_path: Path) -> None:
    nodes = [("Dropout", ["x"], ["d", "mask"], {}), ("Conv", ["d", "w"], ["y"], {})]
    path = _onnx(tmp_path, nodes, [1, 3, 8, 8], [1, 4, 6, 6], opset=9)
    assert importers.load(path).num_ops == 2


def _packing(sizes: list[int], memory_bytes: int) -> Problem:
    """A chain of operators with parameters of these sizes, on three devices."""
    some = {"param_bytes": sizes, "memory_bytes": memory_bytes, "link": (1e-6, 1e9)}
    return small_problem(np.ones((len(sizes), 3)), chain(len(sizes)), **some)


@pytest.mark.parametrize("objective", ["period", "latency", "max_load"])
def test_best_of_searches_where_no_constructive_method_fits(objective: Any) -> None:
    sizes = [1, 47, 20, 44, 8, 35, 36, 2, 19, 27, 37, 24]  # 300 bytes
    problem = _packing(sizes, 102).with_objective(objective)
    constructive = load("best_of", planners=("heft", "contiguous_dp"))(problem)
    assert np.isfinite(constructive.value_s) and np.isfinite(load("best_of")(problem).value_s)
    assert constructive.stats["winner"] in ("macro_search", "local_search")
    assert load("heft")(problem).value_s == np.inf


def test_not_found_is_told_from_cannot_be() -> None:
    for name in ("best_of", "local_search", "heft", "ideal_dp"):
        stderr = load(name)(_packing([60, 60, 60, 60], 100)).stats["infeasible"]
        assert "does not prove that no placement fits: a search" in stderr, name
        assert "--planner local_search --seconds 60" in stderr
        stderr = load(name)(_packing([60, 60, 60, 200], 120)).stats["infeasible"]
        assert "nothing can fit in memory: the parameters take 380 bytes" in stderr, name
        stderr = load(name)(_packing([60, 60, 101], 100)).stats["infeasible"]
        assert "operator 2 ('op2') needs 101 bytes, the largest device" in stderr, name
    best = load("best_of")(_packing([60, 60, 101], 100))
    assert best.stats["evaluations"] < 200  # nothing is searched for that cannot be


@given(seed=st.integers(0, 10**6))
def test_what_cannot_fit_fits_nowhere(seed: int) -> None:
    problem = random_problem(seed, num_ops=4, num_devices=2, grouped=True, unsupported=True)
    used = problem.graph.param_bytes.sum() + problem.graph.tensor_bytes.max(initial=1)
    sizes = np.random.default_rng(seed).integers(1, used + 2, 2).tolist()
    problem = altered(problem, {"memory_bytes": lambda d: sizes[problem.cluster.index(d.name)]})
    assume(cannot_fit(problem))
    assert np.isinf(score(problem, every_placement(problem))).all()
