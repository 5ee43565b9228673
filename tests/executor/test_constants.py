"""Tensors that are the same in every call: computed once, and nobody's to change."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils import _pytree as pytree

from placement.capturing import capture
from placement.cluster import Cluster, Device
from placement.executor import Runner
from placement.executor.constants import constants, with_constants
from placement.program import Ref, split_inputs
from placement.workloads import load
from tests.modules import module_of

CPU = torch.device("cpu")
TWO = Cluster("two", (Device("a", "cpu"), Device("b", "cpu")))


def of(forward: Any) -> nn.Module:
    return module_of(forward, bias=nn.Parameter(torch.ones(4)))


def same_twice(module: nn.Module, inputs: Any) -> None:
    """On one device and on two, a second time after the first outputs were overwritten."""
    graph, (args, kwargs) = capture(module, inputs), split_inputs(inputs)
    with torch.no_grad():
        expected = pytree.tree_leaves(module(*args, **kwargs))
    for placement in ([0] * graph.num_ops, [n % 2 for n in range(graph.num_ops)]):
        with Runner(graph, TWO, placement) as runner:
            for _ in range(3):
                results = pytree.tree_leaves(runner(*args, **kwargs))
                torch.testing.assert_close(results, expected)
                with torch.inference_mode():
                    for x in results:
                        x.fill_(7)


kept = partial(nn.functional.dropout, training=False)
# Of these the operators that are computed once are known.
ONCE: dict[str, tuple[Any, list[str]]] = {
    "mask": (lambda m, x: x * (torch.arange(4).unsqueeze(0) >= 2), ["arange", "unsqueeze", "ge"]),
    "two outputs": (lambda m, x: x + torch.arange(4.0).max(0)[0], ["arange", "max"]),
    "of a parameter": (lambda m, x: x + (m.bias * 2), []),
    "of an input": (lambda m, x: x + torch.ones_like(x), []),
    "returned": (lambda m, x: (x + 1, torch.arange(4)), []),
    "a view is returned": (lambda m, x: (x + 1, torch.arange(4).view(2, 2)), []),
    "perhaps itself is returned": (lambda m, x: (x, kept(torch.arange(4.0) + 1)), ["arange"]),
    "perhaps a view is returned": (
        lambda m, x: (x + 1, torch.einsum("ij->ji", torch.arange(4.0).view(2, 2))),
        [],
    ),
    "written": (lambda m, x: torch.arange(4.0).add_(x), []),
    "a copy is written": (lambda m, x: (torch.arange(4.0) + 1).clone().add_(x), ["arange", "add"]),
}


@pytest.mark.parametrize("name", ONCE)
def test_what_nobody_writes_to_or_gets_is_computed_once(name: str) -> None:
    function, once = ONCE[name]
    module, x = of(function).eval(), torch.randn(4)
    graph = capture(module, x)
    computed = constants(graph.program, {*range(graph.num_ops)}, CPU)
    kinds = [graph.op_kind[graph.tensor_src[t]].split(".")[1] for t in computed]
    assert kinds == once, [step.target for step in graph.program.steps]
    same_twice(module, x)


def test_a_training_step_has_none_and_few_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = of(lambda m, x: (x * m.bias * torch.arange(4)).sum()), torch.randn(4)
    step = capture(module, (x, None), mode="training", loss=lambda y, _: y)
    assert constants(step.program, {*range(step.num_ops)}, CPU) == {}
    graph = capture(module.eval(), x)
    monkeypatch.setattr("placement.executor.constants._MOST_BYTES", 31)  # of 32
    assert constants(graph.program, {*range(graph.num_ops)}, CPU) == {}


def test_what_fails_fails_where_it_runs() -> None:
    broken = capture(of(lambda m, x: x + torch.arange(4)), torch.randn(4))
    (step, *_) = broken.program.steps
    step.kwargs["dtype"] = "none"
    with Runner(broken, TWO, [0] * broken.num_ops) as runner:
        with pytest.raises(RuntimeError) as error:
            runner(torch.randn(4))
        assert "in operator 'arange'" in str(error.value.__notes__)


MASKS = {
    "hides nothing": (torch.ones(5, 5, dtype=torch.bool), (None, False)),
    "hides what comes later": (torch.ones(1, 5, 5, dtype=torch.bool).tril(), (None, True)),
    "hides more": (torch.ones(5, 5, dtype=torch.bool).tril(-1), None),
    "is added": (torch.zeros(5, 5), None),
    "is not square": (torch.ones(5, 7, dtype=torch.bool).tril(), None),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_needs_no_mask_that_says_what_kernels_know(name: str) -> None:
    mask, expected = MASKS[name]
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, mask.shape[-1], 8)
    module = of(lambda m, q: attention(q, k, k, m.get_buffer("mask"), scale=0.3))
    module.register_buffer("mask", mask)
    graph = capture(module.eval(), q)
    (step,) = [s for s in graph.program.steps if "attention" in str(s.target)]
    step = with_constants(type(step)(step.target, (*step.args[:3], Ref(99)), step.kwargs,
                                     step.outputs, False, (0,)), {99: mask})  # fmt: skip
    if expected is None:
        assert step.args[3] == Ref(99)
        return
    assert (step.kwargs["attn_mask"], step.kwargs["is_causal"]) == expected
    assert step.kwargs["scale"] == 0.3 and len(step.args) == 3
    found = step.target(q, k, k, **step.kwargs)
    torch.testing.assert_close(found, attention(q, k, k, mask, scale=0.3))


def test_a_mask_of_one_dimension_is_left_to_attention() -> None:
    module = of(lambda m, x: attention(x, x, x, attn_mask=torch.arange(5) < 3)).eval()
    same_twice(module, torch.randn(2, 5, 8))


@pytest.mark.parametrize("name", ["bert_tiny", "gpt2_tiny", "vit_tiny"])
def test_models_build_no_masks_in_their_calls(name: str) -> None:
    module, inputs = load(name)
    same_twice(module, inputs)
    graph = capture(module, inputs)
    known = constants(graph.program, {*range(graph.num_ops)}, CPU)
    attend = [s for s in graph.program.steps if "attention" in str(s.target)]
    assert attend and all(with_constants(s, known).kwargs["attn_mask"] is None for s in attend)
