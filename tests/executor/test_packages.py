"""Packages of AOTInductor: stages that run in a pipeline without the model's code."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from placement import capture
from placement.cluster import Cluster, Device
from placement.executor.packages import PackageError, write_packages
from placement.tools.files import FileError
from tests.modules import module_of

TWO = Cluster("two", (Device("cpu:0", cores=(0,)), Device("cpu:1", cores=(0,))))


def net() -> nn.Module:
    parts = {"first": nn.Linear(16, 32), "second": nn.Linear(32, 4)}
    return module_of(
        lambda m, x: (hidden := torch.tanh(m.first(x)), m.second(hidden).softmax(-1)), **parts
    )


@pytest.mark.usefixtures("compiler")
def test_packages_compute_what_the_module_does(tmp_path: Path) -> None:
    """In another process, which sees the folder and PyTorch alone."""
    torch.manual_seed(0)
    module, x = net().eval(), torch.randn(8, 16)
    graph = capture(module, x)
    on = np.array([0, 0, 1, 1])  # linear, tanh | linear, softmax
    folder = tmp_path / "stages"
    assert write_packages(graph, TWO, on, range(4), folder) == 2
    files = {path.name for path in folder.iterdir()}
    loaders = {"stages.json", "run.py", "pipeline.h", "main.cpp", "CMakeLists.txt"}
    assert files == {"0.pt2", "1.pt2", *loaders}
    (beside := tmp_path / "beside").mkdir()
    assert folder.stat().st_mode == beside.stat().st_mode  # who serves it may be another user
    other_order = (x + 1).t().contiguous().t()  # of elements in memory
    torch.save([x, other_order, x - 1], tmp_path / "items.pt")
    plan = json.loads((folder / "stages.json").read_text())
    plan["devices"][1]["cores"] = [4000]  # as on another machine
    (folder / "stages.json").write_text(json.dumps(plan))
    script = """
import sys, torch
from run import Pipeline
items = torch.load("../items.pt")
with Pipeline(".") as pipeline:
    assert len(pipeline(items[0])) == 2
    torch.save(list(pipeline.stream([x] for x in items)), "../outputs.pt")
    for wrong in (items[0].double(), items[0].t(), items[0][:4], 1.0):
        try:
            pipeline(wrong)
        except ValueError as error:
            assert "float32 of shape [8, 16]" in str(error), error
        else:
            raise AssertionError(wrong)
    for wrong in ((), (items[0], items[0])):
        try:
            pipeline(*wrong)
        except ValueError as error:
            assert str(error) == f"{len(wrong)} inputs, the packages are for 1", error
        else:
            raise AssertionError(len(wrong))
assert "placement" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, env={}, timeout=120)
    for item, outputs in zip([x, x + 1, x - 1], torch.load(tmp_path / "outputs.pt"), strict=True):
        torch.testing.assert_close(outputs, module(item))
    with pytest.raises(FileError, match="it is there; name a new folder"):
        write_packages(graph, TWO, on, range(4), folder)


def test_what_cannot_be_packaged_is_refused(tmp_path, monkeypatch):
    graph = capture(net().eval(), torch.randn(8, 16))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PackageError, match="no C\\+\\+ compiler 'no-such-compiler'"):
        write_packages(graph, TWO, [0, 0, 1, 1], range(4), tmp_path / "a")
    monkeypatch.setenv("CXX", sys.executable)  # is there
    refuses = Mock(side_effect=RuntimeError("no such operator"))
    monkeypatch.setattr(torch._inductor, "aot_compile", refuses)
    with pytest.raises(PackageError, match="Inductor refuses a stage: RuntimeError: no such"):
        write_packages(graph, TWO, [0, 0, 1, 1], range(4), tmp_path / "a")
    pictures = module_of(lambda m, x: m.first(x.float().abs()), first=nn.Linear(16, 4)).eval()
    waves = capture(pictures, torch.zeros(8, 16, dtype=torch.complex64))
    with pytest.raises(PackageError, match="no inputs of complex64: convert them"):
        write_packages(waves, TWO, [0] * waves.num_ops, range(waves.num_ops), tmp_path / "a")
    gpu = Cluster("gpu", (Device("cuda:0", kind="cuda"),))
    with pytest.raises(PackageError, match="only plans of CPU devices"):
        write_packages(graph, gpu, [0, 0, 0, 0], range(4), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
