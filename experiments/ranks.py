"""Processes of a study, one per device, that wait while others run.

    python -m experiments.ranks JOB.json

What each does is a generator, ``package.module:name`` of a job and a rank: it answers for the first
time when it is ready, and once more for each line that it is then told. A rank that serves others
has no answers. A job is what ``Ranks`` is given, with the ``cluster`` and the ``folder``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch

from placement.cluster import Cluster

NAMESPACES = ("placement-a", "placement-b")
PATIENCE_S = 120.0


class Ranks:
    """Two or more processes that do ``work``; with ``namespaces`` each in its own network.

    Attributes:
        folder: where they find what the job is, and may leave what they make.
        processes: by rank. errors: files of what they say of errors.
    """

    def __init__(
        self,
        work: str,
        cluster: Cluster,
        job: Mapping[str, Any],
        *,
        namespaces: bool = False,
        second: Mapping[str, str] | None = None,
    ) -> None:
        """``second``: environment variables of the second process."""
        self._kept = tempfile.TemporaryDirectory()
        self.folder = Path(self._kept.name)
        cluster.to_yaml(self.folder / "cluster.yaml")
        path = self.folder / "job.json"
        path.write_text(json.dumps({"work": work, **job}))
        self.errors = [self.folder / f"{rank}.err" for rank in range(cluster.num_devices)]
        command = [sys.executable, "-m", "experiments.ranks", str(path)]
        self.processes = start(command, self.errors, namespaces, second)

    def answer(self, rank: int = 0) -> Any:
        """The next answer of a rank.

        Raises:
            RuntimeError: it has ended; with its last words.
        """
        out = self.processes[rank].stdout
        assert out is not None
        text = out.readline()
        if not text:
            raise RuntimeError(self.errors[rank].read_text()[-2000:])
        return json.loads(text)

    def tell(self, text: str, *ranks: int) -> None:
        for rank in ranks:
            into = self.processes[rank].stdin
            assert into is not None
            with suppress(BrokenPipeError):  # it has ended, as its answer will say
                into.write(text + "\n")
                into.flush()

    def ends(self, items: int | str) -> list[float]:
        """Of a stream of so many ``items``: when each ended, in seconds from its beginning."""
        self.tell(str(items), 0)
        ends: list[float] = self.answer()
        return ends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody is told anything any more, so all end."""
        for process in self.processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            ended_late(process, 20)
        self._kept.cleanup()


def start(
    command: Sequence[str],
    errors: Sequence[Path],
    namespaces: bool = False,
    second: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[str]]:
    """One process for each file of ``errors``; they find each other as ``torchrun`` would let them.

    ``second``: environment variables of the second one.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for r, path in enumerate(errors):
        env = os.environ | {
            "RANK": str(r), "WORLD_SIZE": str(len(errors)), "MASTER_PORT": str(port),
            "MASTER_ADDR": "10.77.0.1" if namespaces else "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "cable" if namespaces else "lo", "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # fmt: skip
        env |= second or {} if r == 1 else {}
        inside = ["ip", "netns", "exec", NAMESPACES[r]] if namespaces else []
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with path.open("w") as err:
            processes.append(subprocess.Popen([*inside, *command], env=env, stderr=err, **pipes))
    return processes


def ended_late(process: subprocess.Popen[str], patience_s: float = PATIENCE_S) -> bool:
    """Whether it did not end by itself in time; it has ended now."""
    try:
        process.wait(patience_s)
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True


def main(path: Path) -> None:
    """A rank: its answers, for as long as it is told to go on."""
    job = json.loads(path.read_text()) | {"folder": path.parent}
    job["cluster"] = Cluster.from_yaml(path.parent / "cluster.yaml")
    torch.set_num_threads(1)
    module, _, name = job["work"].partition(":")
    steps = getattr(import_module(module), name)(job, int(os.environ["RANK"]))
    answer = next(steps, None)
    while answer is not None:
        print(json.dumps(answer), flush=True)
        text = sys.stdin.readline().strip()
        answer = steps.send(text) if text else None
    steps.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
