"""Training on a device of its own, which cannot be mixed with the CPU."""

import os
import subprocess
import sys

from experiments.study import ROOT

TRAINED = ("placeto", "gdp", "hdp", "hsdag", "giph", "post", "doppler", "released_latency",
           "released_order", "search_max_load", "released_dispatch")  # fmt: skip
MIXED = """
import torch
from tests import strict_device
here, there = torch.ones(2), torch.ones(2, device="strict")
print((there + 1).cpu().tolist(), there.device)
for mixed in (lambda: here + there, there.numpy,
              lambda: torch.rand(2, generator=torch.Generator(), device="strict")):
    try:
        mixed()
    except (RuntimeError, TypeError):
        print("refused")
"""


def _python(*arguments: str) -> list[str]:
    given = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    found = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout.splitlines()


def test_the_device_refuses_to_be_mixed():
    assert _python("-c", MIXED) == ["[2.0, 2.0] strict:0", *["refused"] * 3]


def test_every_formulation_trains_on_another_device():
    assert _python("-m", "tests.strict_device", *TRAINED) == list(TRAINED)
