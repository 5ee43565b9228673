"""Plans over processes: equal results, prediction, a peer, and what happens when something fails.

    python -m experiments.distributed [--rounds 7] [--tiny]

Outputs with two and four gloo processes and training losses with two, against the plain module.
The measured period against the predicted one, with the links that ``placement profile
--distributed`` measures; also between two network namespaces with limited bandwidth, where this
process may make them. Throughput against ``torch.distributed.pipelining`` with the same cut in the
same number of processes, round by round in turns, and of a plan that it cannot express. The time
until every process has ended after ``kill -9``, SIGSTOP and a dropped link.
Writes ``experiments/results/distributed.md`` and ``.json``.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.fidelity import merged
from experiments.peers import STACKS, TINY, Peer, Stack, same_cut
from experiments.runs import in_turns, two_cores
from experiments.study import Option, Options, Rows, Study, run, say
from experiments.tables import Column, table
from placement.capturing import capture
from placement.capturing.training import plain_step
from placement.cluster import Cluster
from placement.costs.measure import measure
from placement.executor.distributed import DistributedRunner, DistributedTrainer, pin
from placement.executor.distributed_world import World
from placement.problem import Problem
from placement.simulator import simulate
from placement.timeline import steady_period

NAMESPACES = ("placement-a", "placement-b")
RATE, LIMIT = "400mbit", "burst 64kb latency 50ms"
TIMEOUT_S = 5.0  # of the runs in which something fails
PATIENCE_S = 120.0


# --- a rank: a process of its own, driven by lines ------------------------------------------------


def rank_main(path: str) -> None:
    """Run what the job file says: each line ``run`` is a stream; rank 0 answers with its times."""
    job = json.loads(Path(path).read_text())
    stack, place = Stack(**job["stack"]), np.array(job["placement"], np.int32)
    cluster = Cluster.from_yaml(job["cluster"])
    torch.set_num_threads(1)
    module, inputs = stack.build(), stack.inputs(job["micro_batches"])
    data = list(inputs.split(stack.item[0]))
    if job["train"]:
        _train(module, data, cluster, place, path)
        return
    graph = capture(module, data[0], name=stack.name)
    pin(cluster)
    with World.join(job["timeout_s"]) as world:
        runner = DistributedRunner(graph, cluster, place, world=world, max_in_flight=4)
        if world.rank:
            runner.serve()
            return
        outputs = list(runner.stream(data))
        np.save(Path(path).with_suffix(".npy"), torch.cat(outputs).numpy())
        print("ready", flush=True)
        for line in sys.stdin:
            if line.strip() == "stop":
                break
            feed = itertools.cycle(data) if line.strip() == "forever" else iter(data)
            began = time.perf_counter()
            ends = [time.perf_counter() - began for _ in runner.stream(feed)]
            print(json.dumps(ends), flush=True)
        runner.close()


def _train(
    module: nn.Module, data: list[torch.Tensor], cluster: Cluster, place: Any, path: str
) -> None:
    loss, optimizer = nn.functional.mse_loss, torch.optim.AdamW(module.parameters(), lr=1e-3)
    pairs = [(x, x.flip(0)) for x in data]
    graph = capture(module, pairs[0], mode="training", loss=loss, optimizer=optimizer)
    # Backward is where its forward is: by the block that an operator belongs to.
    block = [int((p.removeprefix("module.") or "0").split(".")[0]) for p in graph.op_module]
    _, first, member = np.unique(graph.group, return_index=True, return_inverse=True)
    place = (np.array(block) >= (max(block) + 1) // 2)[first][member].astype(np.int32)
    with World.join(60.0) as world:
        trainer = DistributedTrainer(graph, cluster, place, optimizer, world=world)
        if world.rank:
            trainer.serve()
            return
        losses = [trainer.step(pairs).tolist() for _ in range(4)]
        trainer.close()
    Path(path).with_suffix(".losses").write_text(json.dumps(losses))
    print("ready", flush=True)


class Ranks:
    """The processes of a run, one per device; with ``namespaces`` each in its own network."""

    def __init__(
        self,
        folder: Path,
        cluster: Cluster,
        placement: Any,
        stack: Stack,
        num_batches: int,
        *,
        train: bool = False,
        timeout_s: float = 60.0,
        namespaces: bool = False,
    ) -> None:
        self.path = Path(tempfile.mkdtemp(dir=folder)) / "job.json"
        yaml = self.path.with_suffix(".yaml")
        cluster.to_yaml(yaml)
        job = {
            "stack": asdict(stack), "placement": np.asarray(placement).tolist(),
            "micro_batches": num_batches, "cluster": str(yaml), "train": train,
            "timeout_s": timeout_s,
        }  # fmt: skip
        self.path.write_text(json.dumps(job))
        self.errors = [self.path.with_suffix(f".{r}.err") for r in range(cluster.num_devices)]
        command = [sys.executable, "-m", "experiments.distributed", "--rank", str(self.path)]
        self.processes = start(command, cluster.num_devices, namespaces, self.errors)

    def line(self) -> str:
        out = self.processes[0].stdout
        assert out is not None
        text: str = out.readline()
        if not text:
            raise RuntimeError(self.errors[0].read_text()[-2000:])
        return text.strip()

    def send(self, text: str) -> None:
        into = self.processes[0].stdin
        assert into is not None
        into.write(text + "\n")
        into.flush()

    def run(self) -> tuple[float, float]:
        self.send("run")
        ends: list[float] = json.loads(self.line())
        return ends[-1], float(steady_period(np.array(ends)))

    def difference(self, expected: np.ndarray[Any, Any]) -> float:
        return float(np.abs(np.load(self.path.with_suffix(".npy")) - expected).max())

    def close(self) -> None:
        if self.processes[0].poll() is None:
            self.send("stop")
        for process in self.processes:
            ended_late(process, 20)


def start(
    command: list[str], size: int, namespaces: bool, errors: list[Path]
) -> list[subprocess.Popen[str]]:
    """One process per rank, which find each other as ``torchrun`` would let them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for r in range(size):
        env = os.environ | {
            "RANK": str(r), "WORLD_SIZE": str(size), "MASTER_PORT": str(port),
            "MASTER_ADDR": "10.77.0.1" if namespaces else "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "cable" if namespaces else "lo", "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # fmt: skip
        inside = ["ip", "netns", "exec", NAMESPACES[r]] if namespaces else []
        with errors[r].open("w") as err:
            processes.append(
                subprocess.Popen(
                    inside + command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=err, text=True,
                )
            )  # fmt: skip
    return processes


# --- two hosts ------------------------------------------------------------------------------------


def make_namespaces() -> str:
    """Two networks with a slow cable between them; why not, if this process may not make them."""
    a, b = NAMESPACES
    commands = [
        f"ip netns add {a}", f"ip netns add {b}",
        f"ip -n {a} link add cable type veth peer name cable netns {b}",
    ]  # fmt: skip
    for name, address in ((a, "10.77.0.1"), (b, "10.77.0.2")):
        commands += [
            f"ip -n {name} addr add {address}/24 dev cable", f"ip -n {name} link set cable up",
            f"ip -n {name} link set lo up",
            f"ip netns exec {name} tc qdisc add dev cable root tbf rate {RATE} {LIMIT}",
        ]  # fmt: skip
    for command in commands:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            drop_namespaces()
            return f"`{command}`: {done.stderr.strip()}"
    return ""


def drop_namespaces() -> None:
    for name in NAMESPACES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def links(folder: Path, cluster: Cluster, namespaces: bool) -> Cluster:
    """The cluster with the links that two ranks measure."""
    there, devices = folder / f"links{int(namespaces)}.yaml", folder / "devices.yaml"
    cluster.to_yaml(devices)
    command = [sys.executable, "-m", "placement", "profile", "--distributed", "--cluster"]
    command += [str(devices), "--cluster-out", str(there)]
    errors = [folder / f"links{r}.err" for r in range(2)]
    for r, process in enumerate(start(command, 2, namespaces, errors)):
        process.communicate(timeout=PATIENCE_S)
        if process.returncode:
            raise RuntimeError(errors[r].read_text()[-2000:])
    return Cluster.from_yaml(there)


# --- the parts of the study -----------------------------------------------------------------------


def equal(folder: Path, cluster: Cluster, stack: Stack, num_batches: int) -> dict[str, float]:
    """Largest difference from the plain module: outputs with 2 and 4 processes, losses with 2."""
    module, inputs = stack.build(), stack.inputs(num_batches)
    data = list(inputs.split(stack.item[0]))
    graph = capture(module, data[0], name=stack.name)
    expected = plain_outputs(stack, data)
    differences = {}
    block = np.array([int(p.split(".")[0]) for p in graph.op_module])
    for size in (2, 4):
        named = [replace(cluster.devices[i % 2], name=f"cpu:{i}") for i in range(size)]
        place = block * size // (block.max() + 1)
        ranks = Ranks(folder, Cluster("four", tuple(named)), place, stack, num_batches)
        ranks.line()
        ranks.close()
        differences[f"outputs, {size} processes"] = ranks.difference(expected)
    ranks = Ranks(folder, cluster, [], stack, num_batches, train=True)
    ranks.line()
    ranks.close()
    losses = json.loads(ranks.path.with_suffix(".losses").read_text())
    module = stack.build().train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    pairs = [(x, x.flip(0)) for x in data]
    loss = nn.functional.mse_loss
    plain = [plain_step(module, optimizer, pairs, loss).tolist() for _ in range(4)]
    differences["training losses of 4 steps, 2 processes"] = float(
        np.abs(np.subtract(losses, plain)).max()
    )
    return differences


def plain_outputs(stack: Stack, data: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    """What the module computes without us."""
    module = stack.build()
    with torch.no_grad():
        return torch.cat([module(x) for x in data]).numpy()


def against(
    folder: Path,
    cluster: Cluster,
    stack: Stack,
    num_batches: int,
    rounds: int,
    slow: Cluster | None,
) -> Iterator[dict[str, Any]]:
    """Throughput beside the peer's, and periods beside the predicted ones: a row per plan."""
    data = list(stack.inputs(num_batches).split(stack.item[0]))
    graph = capture(stack.build(), data[0], name=stack.name)
    plain = replace(cluster, links=())
    before = measure(graph, plain, repeats=5)
    groups, member = np.unique(graph.group, return_inverse=True)
    half = same_cut(graph, stack.num_blocks)
    setups = {
        "same cut": (cluster, half),
        "operators at random": (
            cluster, np.random.default_rng(0).integers(0, 2, len(groups))[member]
        ),
        "same cut, the other way round": (cluster, (1 - half).astype(np.int32)),
    }  # fmt: skip
    if slow is not None:
        setups["same cut, two networks"] = (slow, half)
    with ExitStack() as opened:
        peer = Peer(stack, num_batches, [d.cores[0] for d in cluster.devices])
        opened.callback(peer.close)
        ours = {}
        for name, (linked, place) in setups.items():
            far = linked is slow
            ours[name] = Ranks(folder, plain, place, stack, num_batches, namespaces=far)
            opened.callback(ours[name].close)
        for ranks in ours.values():
            ranks.line()
        ways = {"peer": lambda: (peer.run(), 0.0)} | {n: r.run for n, r in ours.items()}
        times = in_turns(ways, rounds, shift=True)
    # The machine changes its speed within minutes: what holds for the rounds lies in between.
    profile = merged([before, measure(graph, plain, repeats=5)])
    expected, peer_s = plain_outputs(stack, data), times["peer"][:, 0]
    for name, ranks in ours.items():
        linked, place = setups[name]
        problem = Problem(graph, linked, replace(profile, links=linked.links))
        predicted_s = simulate(problem, place, num_microbatches=num_batches).period_s
        seconds, periods = times[name].T
        yield {
            "stack": stack.name,
            "plan": name,
            "peer_s": float(np.median(peer_s)) / num_batches,
            "ours_s": float(np.median(seconds)) / num_batches,
            "ratio_to_peer": float(np.median(peer_s / seconds)),
            "ratio_quartiles": np.percentile(peer_s / seconds, [25, 75]).tolist(),
            "predicted_s": predicted_s,
            "measured_s": float(np.median(periods)),
            "error": predicted_s / float(np.median(periods)) - 1,
            "largest_difference": ranks.difference(expected),
        }


def faults(
    folder: Path, cluster: Cluster, stack: Stack, can_drop: bool
) -> Iterator[dict[str, Any]]:
    """Seconds from the fault to the end of the last process, and what rank 0 wrote."""
    graph = capture(stack.build(), stack.inputs(1), name=stack.name)
    plain, half = replace(cluster, links=()), same_cut(graph, stack.num_blocks)
    ways: dict[str, Any] = {
        "kill -9 of rank 1": signal.SIGKILL, "SIGSTOP of rank 1": signal.SIGSTOP,
    }  # fmt: skip
    if can_drop:
        ways["link down"] = f"ip -n {NAMESPACES[1]} link set cable down"
    for name, how in ways.items():
        by_cable = isinstance(how, str)
        ranks = Ranks(folder, plain, half, stack, 8, timeout_s=TIMEOUT_S, namespaces=by_cable)
        ranks.line()
        ranks.send("forever")
        time.sleep(1.0)
        began = time.monotonic()
        if by_cable:
            subprocess.run(how.split(), check=True)
        else:
            os.kill(ranks.processes[1].pid, how)
        left = [ended_late(process) for process in ranks.processes]
        seconds = time.monotonic() - began
        message = ranks.errors[0].read_text().strip()
        at = message.rfind("RankError: ")
        yield {
            "fault": name, "timeout_s": TIMEOUT_S, "seconds": seconds,
            "left_running": any(left), "said": message[at + 11 :] if at >= 0 else message[-300:],
        }  # fmt: skip


def ended_late(process: subprocess.Popen[str], patience_s: float = PATIENCE_S) -> bool:
    """Whether it did not end by itself in time; it has ended now."""
    try:
        process.wait(patience_s)
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True


def rows(options: Options) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    two = two_cores()
    stacks = TINY if options.tiny else (STACKS[0], STACKS[2])
    small = TINY[0] if options.tiny else Stack("small", 4, (4, 16, 64), heads=4)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        why_not = make_namespaces()
        try:
            say("links")
            near = links(folder, two, False)
            far = None if why_not else links(folder, two, True)
            namespaces = f"not made here, {why_not}" if why_not else "made here"
            yield {"part": "namespaces", "said": namespaces}
            say("equal results")
            for what, value in equal(folder, near, small, 4).items():
                yield {"part": "equal", "what": what, "difference": value}
            for stack in stacks:
                say(stack.name)
                batches, rounds = options.micro_batches, options.rounds
                for row in against(folder, near, stack, batches, rounds, far):
                    yield {"part": "against", **row}
            say("faults")
            for row in faults(folder, two, TINY[0], not why_not):
                yield {"part": "faults", **row}
        finally:
            drop_namespaces()


def parts(rows: Rows, options: Options) -> dict[str, Any]:
    by: dict[str, list[Any]] = {}
    for row in rows:
        by.setdefault(row["part"], []).append(row)

    def ratio(row: dict[str, Any]) -> str:
        low, high = row["ratio_quartiles"]
        return f"{row['ratio_to_peer']:.2f}x ({low:.2f} to {high:.2f})"

    return {
        "rate": RATE,
        "namespaces": by["namespaces"][0]["said"],
        "error": 100 * float(np.mean([abs(r["error"]) for r in by["against"]])),
        "equal": table(
            by["equal"],
            Column("largest difference from the plain module", "what"),
            Column("", lambda r: f"{r['difference']:.1e}"),
        ),
        "against": table(
            by["against"],
            Column("model", "stack"),
            Column("plan", "plan"),
            Column("peer", "peer_s", 2, 1e3, " ms"),
            Column("ours", "ours_s", 2, 1e3, " ms"),
            Column("against peer", ratio),
            Column("predicted", "predicted_s", 2, 1e3, " ms"),
            Column("measured", "measured_s", 2, 1e3, " ms"),
            Column("error", lambda r: f"{100 * r['error']:+.0f} %"),
        ),
        "faults": table(
            by["faults"],
            Column("fault", "fault"),
            Column("timeout", "timeout_s", 0, unit=" s"),
            Column("every process ended after", "seconds", 1, unit=" s"),
            Column("left running", lambda r: "yes" if r["left_running"] else "no"),
            Column("rank 0 said", lambda r: " ".join(r["said"].split())),
        ),
    }


STUDY = Study(
    name="distributed",
    rows=rows,
    parts=parts,
    options={
        "rounds": 7,
        "micro_batches": 16,
        "tiny": Option(False, "a model of a millisecond, as a test"),
    },
    facts=lambda options: {"rounds": options.rounds, "micro_batches": options.micro_batches},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point, of the study and of each of its ranks."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--rank"]:
        rank_main(words[1])
        return 0
    return run(STUDY, words)


if __name__ == "__main__":
    sys.exit(main())
