"""Hot rows of embeddings apart from the others: results, which rows, and memory of a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import placement
from placement.cluster import Cluster, Device
from placement.executor import Runner
from placement.pieces import PiecesError, hot_rows, row_counts
from placement.program import run_program
from placement.workloads.dlrm import DLRM
from tests import emulated_gpu

ROWS, DIM = 40, 8


class Tables(nn.Module):
    """Lookups of each kind; two of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(ROWS, DIM)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.mean = nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.most = nn.EmbeddingBag(ROWS, DIM, mode="max")

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        twice = self.word(ids.flip(0))
        return self.word(ids), twice, self.bag(ids), self.mean(ids), self.most(ids)


def zipf(shape: tuple[int, ...], rows: int = ROWS, seed: int = 0) -> Tensor:
    """Row ``r`` with probability about ``1 / (r + 1)``, in an order of its own."""
    rng = np.random.default_rng(seed)
    share = 1.0 / np.arange(1, rows + 1)
    order = np.random.default_rng(1).permutation(rows)
    return torch.from_numpy(order[rng.choice(rows, shape, p=share / share.sum())])


@pytest.fixture(scope="module")
def tables() -> tuple[nn.Module, placement.OpGraph]:
    torch.manual_seed(0)
    module = Tables().eval()
    return module, placement.capture(module, (zipf((6, 5)),))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3 * ROWS * DIM * 4))
def test_results_are_those_of_whole_tables(tables, seed, hot_bytes):
    module, graph = tables
    rng = np.random.default_rng(seed)
    counts = {f"{name}.weight": rng.integers(0, 5, ROWS) for name in ("word", "bag", "mean")}
    parted = hot_rows(graph, counts, hot_bytes)
    for batch in (zipf((6, 5), seed=seed), zipf((6, 5), seed=seed + 1)):
        found, wanted = run_program(parted.program, (batch,)), module(batch)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
        torch.testing.assert_close(found, list(wanted), rtol=1e-5, atol=1e-5)
    hot = [p for p, x in zip(parted.program.param_names, parted.program.params, strict=True)
           if "[hot]" in p and x.nbytes]  # fmt: skip
    size = sum(parted.program.params[parted.program.param_names.index(p)].nbytes for p in hot)
    assert size - len(hot) * DIM * 4 <= hot_bytes  # but for the zeros


@pytest.mark.parametrize("row", [-1, ROWS])
def test_rows_that_do_not_exist_are_refused_as_by_the_module(row: int) -> None:
    """Which the compiled loop would read from memory that is something else's."""
    table, cold = torch.ones(ROWS, DIM), torch.zeros(ROWS, dtype=torch.bool)
    with pytest.raises(IndexError, match=f"row {min(row, 3)} or {max(row, 3)} of 40 does not"):
        torch.ops.placement.cold_rows(table, cold, torch.tensor([3, row]), None, False, False)


def test_ids_may_be_of_32_bits() -> None:
    module, ids = Tables().eval(), zipf((6, 5)).int()
    graph = placement.capture(module, (ids,))
    parted = hot_rows(graph, row_counts(graph, [ids]), 8 * DIM * 4)
    wanted = [*module(ids)]
    torch.testing.assert_close(run_program(parted.program, (ids,)), wanted, rtol=1e-5, atol=1e-5)
    with Runner(parted, Cluster("one", (Device("cpu:0"),)), [0] * parted.num_ops) as runner:
        torch.testing.assert_close([*runner(ids)], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offsets", [[1, 3], [0, 3, 2], [0, 2, 9], [], [-1, 2]])
@pytest.mark.parametrize("ends", [False, True])
def test_bags_that_do_not_follow_each_other_are_refused(offsets: list[int], ends: bool) -> None:
    """The compiled loop would write rows to memory that is something else's."""
    table, cold, ids = torch.ones(ROWS, DIM), torch.ones(ROWS, dtype=torch.bool), torch.arange(4)
    begins = torch.tensor(offsets, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"bags begin at \["):
        torch.ops.placement.cold_rows(table, cold, ids, begins, False, ends)


def test_rows_that_are_read_most_are_hot() -> None:
    """8 of 120 rows fit; counted by hand."""
    module, ids = Tables().eval(), zipf((64, 5))
    graph = placement.capture(module, (ids,))
    counts = row_counts(graph, [ids, {"ids": ids}])
    by_hand = 2 * np.bincount(ids.flatten().numpy(), minlength=ROWS)
    assert set(counts) == {"word.weight", "bag.weight", "mean.weight"}
    np.testing.assert_array_equal(counts["bag.weight"], by_hand)
    np.testing.assert_array_equal(counts["word.weight"], 2 * by_hand)  # it is looked up twice
    parted = hot_rows(graph, counts, 8 * DIM * 4)
    names = parted.program.param_names
    table = parted.program.params[names.index("word.weight[hot]")]
    hottest = np.sort(np.argsort(-by_hand, kind="stable")[: len(table) - 1])
    assert torch.equal(table[:-1], module.word.weight.detach()[hottest])
    assert not table[-1].any()
    # A table with nothing hot is as it was, and so is one that keeps the largest.
    whole = hot_rows(graph, {"bag.weight": by_hand * 0}, 10**6)
    assert whole.op_name == graph.op_name
    assert all(not name.startswith("most.weight[") for name in names)


def test_counts_of_other_tables() -> None:
    graph = placement.capture(Tables().eval(), (zipf((2, 2)),))
    for counts, text in (
        ({"most.weight": np.ones(ROWS)}, "has no embedding 'most.weight' that can be cut; it has"),
        ({"word.weight": np.ones(7)}, r"'word.weight' has 40 rows: counts are of shape \[7\]"),
        ({"word.weight": -np.ones(ROWS)}, "counts of 'word.weight' are not all at least 0: -1.0"),
    ):
        with pytest.raises(PiecesError, match=text):
            hot_rows(graph, counts, 1000)


def test_a_quarter_of_the_tables_on_an_emulated_gpu() -> None:
    """The GPU has no memory for the tables: hot rows are there, the others are not."""
    rows, dim, tables = 4000, 16, 3
    torch.manual_seed(0)
    module = DLRM(tables, rows, dim, bottom=(16,), top=(16,)).eval()
    inputs = (torch.randn(32, 13), zipf((tables, 32, 4), rows))
    graph = placement.capture(module, inputs)
    whole_bytes = tables * rows * dim * 4
    counts = row_counts(graph, [(inputs[0], zipf((tables, 32, 4), rows, s)) for s in range(4)])
    parted = hot_rows(graph, counts, whole_bytes // 4)
    on = np.array([0 if "#1" in name else 1 for name in parted.op_name], np.int32)
    device = Device("cuda:0", "cuda", memory_bytes=whole_bytes)
    cluster = Cluster("two", (Device("cpu:0"), device))
    with emulated_gpu.emulated(memory_bytes=whole_bytes) as gpu:
        with Runner(parted, cluster, on) as runner:
            for seed in range(3):
                batch = (inputs[0], zipf((tables, 32, 4), rows, 10 + seed))
                torch.testing.assert_close(runner(*batch), module(*batch), rtol=1e-5, atol=1e-5)
        assert gpu.peak[0] < whole_bytes * 3 // 4 and gpu.num_races == 0
