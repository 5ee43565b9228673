"""What every test stands on: one thread per process, nothing sent anywhere, fixed seeds."""

import os

# Two test processes share two cores. A thread pool per process would spend the suite waiting for
# each other in OpenMP's spin loops. Must be set before numpy or torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["WANDB_MODE"] = "disabled"
os.environ["WANDB_SILENT"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["HYDRA_FULL_ERROR"] = "1"
os.environ["CXX"] = "no-compiler"  # ``optimize`` would compile; see the fixture ``compiler``

import gc
import json
import random
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

gc.disable()  # until all is imported


def pytest_collection_finish() -> None:
    """No collection of garbage looks again at what was imported: a tenth of the suite's time.

    And one begins after 20,000 new objects, not after 700: that was another twentieth.
    """
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


HANGS_S = 360.0  # a minute after pytest-timeout


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a process that pytest-timeout cannot: it waits in native code, or in a ``finally``."""
    with item.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        terminal = os.dup(2)

    def end() -> None:
        frames = sys._current_frames()
        stacks = ["".join(traceback.format_stack(frame)[-12:]) for frame in frames.values()]
        os.write(terminal, "\n".join([f"\n{item.nodeid} hangs:", *stacks]).encode())
        os._exit(1)

    timer = threading.Timer(HANGS_S, end)
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()
        os.close(terminal)


# A shell starts what it puts into the background with Ctrl-C ignored, which children inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time: few, as more say the same. And no deadline: the machine may be busy.
patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("suite", max_examples=50, derandomize=True, **patient)
# For a property whose claim is a number of cases: pytest --hypothesis-profile many -k NAME
settings.register_profile("many", settings.get_profile("suite"), max_examples=2000)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same global random state."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:  # importing it here would cost every process seconds
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Reference data that lies beside a developer's checkout; tests that need it skip without."""
    folder = Path(__file__).parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"no reference data: {folder} does not exist")
    return folder


@pytest.fixture
def quick_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles and plans as measured, but in the fewest runs: for tests to which all are equal."""
    from placement.costs import calibration, measure, transfers

    few = {"most_times": 1, "rounds": 1, "steps": 1}
    for module, changes in (
        (measure, {"patience": 1}), (transfers, {"streamed": 8}), (calibration, few)
    ):  # fmt: skip
        monkeypatch.setattr(module, "EFFORT", module.EFFORT._replace(**changes))
    monkeypatch.setattr("placement.runs.ways.ROUNDS", 2)


class Said(NamedTuple):
    """What a command printed on standard output and on standard error."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Says:
    """Runs ``placement``, or another command, in this process, for an exit code: what it says."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, words: Iterable[str | Path], code: int = 0, command: Any = None) -> Said:
        from placement.__main__ import main

        assert (command or main)([*map(str, words)]) == code
        return Said(*self._capsys.readouterr())

    def answer(self, *words: str | Path, code: int = 0) -> Any:
        """The one JSON object on standard output."""
        return self([*words, "--json"], code).json

    def refused(self, words: Iterable[str | Path]) -> str:
        """The one line, of a limited length, that bad input is answered with."""
        out, err = self(words, 2)
        assert out == "" and err.count("\n") == 1 and "Traceback" not in err, err
        assert err.startswith("placement: error: ") and len(err) <= 1300
        return err.strip()

    def error(self, *words: str | Path) -> str:
        """The one line that a refused command says."""
        out, err = self(words, 2)
        (line,) = [x for x in err.splitlines() if x.startswith("placement: error: ")]
        assert "Traceback" not in err and out == ""
        return line


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    return Says(capsys)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The methods of ``examples/published`` are found by their names, as in their own folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples" / "published"))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs can be compiled; the test is skipped where there is no C++ compiler."""
    from torch._inductor import config

    from placement.tools.compiler import missing_compiler

    monkeypatch.delenv("CXX")
    if missing_compiler():
        pytest.skip("there is no C++ compiler here")
    with config.patch({"cpp.cxx": (None, "g++")}):
        yield
