"""Training on a device of its own, which cannot be mixed with the CPU."""

import os
import subprocess
import sys

from experiments.study import ROOT

TRAINED = ("placeto", "hsdag", "giph", "post", "doppler", "released_latency",
           "released_order", "search_max_load", "released_dispatch")  # fmt: skip
CODE = """
import sys
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
strict_device.main(sys.argv[1:])
"""


def test_every_formulation_trains_on_a_device_that_refuses_to_be_mixed():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE, *TRAINED]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines() == ["[2.0, 2.0] strict:0", *["refused"] * 3, *TRAINED]
