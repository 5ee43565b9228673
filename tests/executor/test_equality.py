"""When results are equal: rounding passes, what is wrong does not."""

import re
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from placement.cluster import Cluster, Device
from placement.executor import equality
from placement.executor.equality import Tolerance, difference, error, module_difference
from tests import emulated_gpu
from tests.modules import module_of

CPU = Cluster("cpu", (Device("cpu:0"),))
GPU = Cluster("gpu", (Device("cpu:0"), Device("cuda:0", "cuda")))


def to_tf32(x):
    """float32 with ten binary digits after the point."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class Deep(nn.Module):
    """Convolutions, which round their factors if ``rounds``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(12))
        self.rounds = False

    def forward(self, x):
        for layer in self.layers:
            if self.rounds:
                x = torch.conv2d(to_tf32(x), to_tf32(layer.weight), layer.bias, padding=1)
            else:
                x = layer(x)
            x = x.relu() * 2
        return x


def test_tf32_is_rounding_on_a_gpu_and_wrong_on_a_cpu():
    module, twin, x = Deep(), Deep(), torch.randn(1, 8, 8, 8)
    twin.load_state_dict(module.state_dict())
    twin.rounds = True
    assert module_difference(twin, module, (x,), {}, GPU) == ""
    assert "not close" in (wrong := module_difference(twin, module, (x,), {}, CPU))
    assert "1e-05 is allowed (float32)" in wrong
    with torch.no_grad():
        torch.testing.assert_close(module(x), module(x))
        with pytest.raises(AssertionError):  # as it was compared before
            torch.testing.assert_close(twin(x), module(x))


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 2e-2)],
)
def test_the_coarsest_dtype_counts(dtype, limit):
    tensors = [torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=dtype), torch.arange(2)]
    assert Tolerance.of(tensors, CPU).relative == limit
    if dtype is torch.float32:
        assert Tolerance.of(tensors, GPU).relative == 3e-3
        torch.backends.cudnn.allow_tf32 = False
        try:
            assert Tolerance.of(tensors, GPU).relative == limit
        finally:
            torch.backends.cudnn.allow_tf32 = True
    else:
        assert Tolerance.of(tensors, GPU).relative == limit


def test_one_wrong_element_of_a_million_shows_with_any_tolerance():
    expected = torch.randn(2**20)
    wrong = expected.clone()
    wrong[12345] += 2.0
    for cluster in (CPU, GPU):
        assert difference([wrong], [expected], Tolerance.of([expected], cluster))


def test_what_is_no_number_must_be_at_the_same_places():
    inf, nan = torch.inf, torch.nan
    expected = torch.tensor([1.0, inf, -inf, nan])
    assert error(expected.clone(), expected) == 0
    for wrong in ([1.0, -inf, -inf, nan], [1.0, inf, -inf, 0.0], [nan, inf, -inf, nan], [1.0]):
        assert error(torch.tensor(wrong), expected) == inf
    assert error(torch.zeros(0), torch.zeros(0)) == 0


@pytest.mark.parametrize(
    ("actual", "expected", "why"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2), r"shape \(2, 3\) instead of \(3, 2\)"),
        (torch.tensor([1, 2, 0]), torch.tensor([1, 0, 2]), "2 of 3 integers are others"),
        (torch.tensor([True]), torch.tensor([False]), "1 of 1 integers"),
        (torch.tensor([1.0, torch.nan]), torch.ones(2), "1 of 2 numbers are not finite in the"),
    ],
)
def test_where_no_number_tells_how_far_two_are_apart_words_do(actual, expected, why):
    wrong = difference([actual], [expected], Tolerance(1e-5, ""))
    assert re.search(f"output 0 is not close: .*{why}", wrong) and "inf" not in wrong.split()


def test_integers_are_equal_or_not():
    assert error(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0
    assert error(torch.tensor([1, 3]), torch.tensor([1, 2])) > 1


def test_float64_decides_where_the_plain_module_is_far_from_it_itself():
    """1e4 + x - 1e4: float32 keeps little of x."""
    large, x = nn.Parameter(torch.tensor(1e4)), torch.rand(100)
    cancels = module_of(lambda m, x: (x + m.large) - m.large, large=large)
    assert module_difference(lambda x: x, cancels, (x,), {}, CPU) == ""  # which is exact
    assert "float64" in module_difference(lambda x: x * 1.001, cancels, (x,), {}, CPU)


def test_flags_that_differ_between_operators_allow_tf32(monkeypatch):
    mixed = Mock(side_effect=RuntimeError("you have used a mix of the legacy and new APIs"))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not equality.tf32_is_allowed()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    assert equality.tf32_is_allowed()


def test_what_is_expected_on_a_gpu_is_compared_there():
    x = torch.randn(50, 60)
    close = (x + 1e-4 * torch.randn(50, 60)).double()
    with emulated_gpu.emulated() as gpu:
        there, began = close.to("cuda:0"), gpu.copies["back and wait"]
        assert error(x, there) == pytest.approx(error(x, close))
        assert error(x.to("cuda:0"), close) == pytest.approx(error(x, close))
        assert gpu.copies["back and wait"] - began < 10  # scalars, and one of the tensors
