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

import argparse
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments._study import RESULTS, launch, say, to_table
from experiments.fidelity import merged
from experiments.peers import STACKS, TINY, Peer, Stack, same_cut
from placement.cluster import Cluster
from placement.executor.distributed import DistributedRunner, DistributedTrainer, pin
from placement.executor.distributed_world import World
from placement.files import write_atomic
from placement.measure import measure, provenance
from placement.problem import Problem
from placement.program import capture
from placement.simulator import simulate
from placement.timeline import steady_period
from placement.training import plain_step

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
    """The processes of a run; ``namespaces`` puts each into a network of its own."""

    def __init__(
        self,
        folder: Path,
        cluster: Cluster,
        placement: Any,
        stack: Stack,
        num_batches: int,
        size: int = 2,
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
        self.errors = [self.path.with_suffix(f".{r}.err") for r in range(size)]
        command = [sys.executable, "-m", "experiments.distributed", "--rank", str(self.path)]
        self.processes = start(command, size, namespaces, self.errors)

    def line(self) -> str:
        """What rank 0 says next."""
        out = self.processes[0].stdout
        assert out is not None
        text: str = out.readline()
        if not text:
            raise RuntimeError(self.errors[0].read_text()[-2000:])
        return text.strip()

    def send(self, text: str) -> None:
        """A line to rank 0."""
        into = self.processes[0].stdin
        assert into is not None
        into.write(text + "\n")
        into.flush()

    def run(self) -> list[float]:
        """When each result of a stream was there."""
        self.send("run")
        ends: list[float] = json.loads(self.line())
        return ends

    def close(self) -> None:
        """End the processes."""
        if self.processes[0].poll() is None:
            self.send("stop")
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(
    command: list[str], size: int, namespaces: bool, errors: list[Path]
) -> list[subprocess.Popen[str]]:
    """One process per rank, which find each other as ``torchrun`` would let them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = []
    for r in range(size):
        env = os.environ | {
            "RANK": str(r), "WORLD_SIZE": str(size), "MASTER_PORT": str(port),
            "MASTER_ADDR": "10.77.0.1" if namespaces else "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "cable" if namespaces else "lo", "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # fmt: skip
        inside = ["ip", "netns", "exec", NAMESPACES[r]] if namespaces else []
        with errors[r].open("w") as err:
            found.append(
                subprocess.Popen(
                    inside + command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=err, text=True,
                )
            )  # fmt: skip
    return found


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
    there = folder / f"links{int(namespaces)}.yaml"
    given = folder / "devices.yaml"
    cluster.to_yaml(given)
    command = [sys.executable, "-m", "placement", "profile", "--distributed", "--cluster"]
    command += [str(given), "--cluster-out", str(there)]
    errors = [folder / f"links{r}.err" for r in range(2)]
    for r, process in enumerate(start(command, 2, namespaces, errors)):
        process.communicate(timeout=PATIENCE_S)
        if process.returncode:
            raise RuntimeError(errors[r].read_text()[-2000:])
    return Cluster.from_yaml(there)


# --- the parts of the study -----------------------------------------------------------------------


def equal(folder: Path, cluster: Cluster, stack: Stack, num_batches: int) -> dict[str, Any]:
    """Largest difference from the plain module: outputs with 2 and 4 processes, losses with 2."""
    module, inputs = stack.build(), stack.inputs(num_batches)
    data = list(inputs.split(stack.item[0]))
    graph = capture(module, data[0], name=stack.name)
    with torch.no_grad():
        expected = torch.cat([module(x) for x in data]).numpy()
    found: dict[str, Any] = {}
    block = np.array([int(p.split(".")[0]) for p in graph.op_module])
    for size in (2, 4):
        named = [replace(cluster.devices[i % 2], name=f"cpu:{i}") for i in range(size)]
        four = Cluster("four", tuple(named))
        place = block * size // (block.max() + 1)
        ranks = Ranks(folder, four, place, stack, num_batches, size)
        ranks.line()
        ranks.close()
        found[f"outputs, {size} processes"] = float(
            np.abs(np.load(ranks.path.with_suffix(".npy")) - expected).max()
        )
    ranks = Ranks(folder, cluster, [], stack, num_batches, train=True)
    ranks.line()
    ranks.close()
    losses = json.loads(ranks.path.with_suffix(".losses").read_text())
    module = stack.build().train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    pairs = [(x, x.flip(0)) for x in data]
    plain = [
        plain_step(module, optimizer, pairs, nn.functional.mse_loss).tolist() for _ in range(4)
    ]
    found["training losses of 4 steps, 2 processes"] = float(
        np.abs(np.subtract(losses, plain)).max()
    )
    return found


def against(
    folder: Path,
    cluster: Cluster,
    stack: Stack,
    num_batches: int,
    rounds: int,
    slow: Cluster | None,
) -> dict[str, Any]:
    """Throughput beside the peer's, and periods beside the predicted ones."""
    data = list(stack.inputs(num_batches).split(stack.item[0]))
    graph = capture(stack.build(), data[0], name=stack.name)
    plain = replace(cluster, links=())
    before = measure(graph, plain, repeats=5)
    groups, member = np.unique(graph.group, return_inverse=True)
    drawn = np.random.default_rng(0).integers(0, 2, len(groups))[member]
    half = same_cut(graph, stack.num_blocks)
    back = (1 - half).astype(np.int32)
    cores = [d.cores[0] for d in cluster.devices]
    peer = Peer(stack, num_batches, cores)
    setups = {
        "same cut": (cluster, half), "operators at random": (cluster, drawn),
        "same cut, the other way round": (cluster, back),
    }  # fmt: skip
    if slow is not None:
        setups["same cut, two networks"] = (slow, half)
    ours = {
        name: Ranks(folder, plain, p, stack, num_batches, namespaces=c is slow)
        for name, (c, p) in setups.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("peer", *ours)}
    periods: dict[str, list[float]] = {name: [] for name in ours}
    try:
        for ranks in ours.values():
            ranks.line()
        for r in range(rounds + 1):
            names = list(seconds)
            for name in names[r % len(names) :] + names[: r % len(names)]:
                if name == "peer":
                    took = peer.run()
                else:
                    ends = ours[name].run()
                    took = ends[-1]
                    if r:
                        periods[name].append(float(steady_period(np.array(ends))))
                if r:  # round 0 warms up
                    seconds[name].append(took)
    finally:
        peer.close()
        for ranks in ours.values():
            ranks.close()
    # The machine changes its speed within minutes: what holds for the rounds lies in between.
    profile = merged([before, measure(graph, plain, repeats=5)])
    with torch.no_grad():
        expected = torch.cat([stack.build()(x) for x in data]).numpy()
    rows = {}
    for name, ranks in ours.items():
        linked, place = setups[name]
        problem = Problem(graph, linked, replace(profile, links=linked.links))
        predicted = simulate(problem, place, num_microbatches=num_batches).period_s
        found = float(np.median(periods[name]))
        ratio = np.array(seconds["peer"]) / np.array(seconds[name])
        rows[name] = {
            "ms_per_micro_batch": 1e3 * float(np.median(seconds[name])) / num_batches,
            "ratio_to_peer": float(np.median(ratio)),
            "ratio_quartiles": np.percentile(ratio, [25, 75]).tolist(),
            "predicted_period_ms": 1e3 * predicted,
            "measured_period_ms": 1e3 * found,
            "error": predicted / found - 1,
            "largest_difference": float(
                np.abs(np.load(ranks.path.with_suffix(".npy")) - expected).max()
            ),
        }
    peer_ms = 1e3 * float(np.median(seconds["peer"])) / num_batches
    return {"stack": stack.name, "peer_ms_per_micro_batch": peer_ms, "ours": rows}


def faults(folder: Path, cluster: Cluster, stack: Stack, can_drop: bool) -> list[dict[str, Any]]:
    """Seconds from the fault to the end of the last process, and what rank 0 wrote."""
    graph = capture(stack.build(), stack.inputs(1), name=stack.name)
    plain, half = replace(cluster, links=()), same_cut(graph, stack.num_blocks)
    ways: list[tuple[str, Any]] = [
        ("kill -9 of rank 1", signal.SIGKILL), ("SIGSTOP of rank 1", signal.SIGSTOP),
    ]  # fmt: skip
    if can_drop:
        ways.append(("link down", f"ip -n {NAMESPACES[1]} link set cable down"))
    rows = []
    for name, how in ways:
        ranks = Ranks(
            folder, plain, half, stack, 8, timeout_s=TIMEOUT_S, namespaces=isinstance(how, str)
        )
        ranks.line()
        ranks.send("forever")
        time.sleep(1.0)
        began = time.monotonic()
        if isinstance(how, str):
            subprocess.run(how.split(), check=True)
        else:
            os.kill(ranks.processes[1].pid, how)
        left = False
        for process in ranks.processes:
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                left = True
                process.kill()
                process.wait()
        said = ranks.errors[0].read_text().strip()
        at = said.rfind("RankError: ")
        rows.append(
            {
                "fault": name, "timeout_s": TIMEOUT_S, "seconds": time.monotonic() - began,
                "left_running": left, "said": said[at + 11 :] if at >= 0 else said[-300:],
            }
        )  # fmt: skip
    return rows


# --- report ---------------------------------------------------------------------------------------


def report(data: dict[str, Any], command: str) -> str:
    """The page."""
    lines = ["# Plans over processes", "", f"`{command}`", "", "## Results", ""]
    cells = [[name, f"{value:.1e}"] for name, value in data["equal"].items()]
    lines += [to_table(["largest difference from the plain module", ""], cells)]
    lines += ["## Throughput and prediction", "", "Peer: torch.distributed.pipelining.", ""]
    head = ["model", "plan", "peer", "ours", "against peer", "predicted", "measured", "error"]
    cells = []
    for row in data["against"]:
        for name, x in row["ours"].items():
            low, high = x["ratio_quartiles"]
            cells.append(
                [
                    row["stack"], name, f"{row['peer_ms_per_micro_batch']:.2f} ms",
                    f"{x['ms_per_micro_batch']:.2f} ms",
                    f"{x['ratio_to_peer']:.2f}x ({low:.2f} to {high:.2f})",
                    f"{x['predicted_period_ms']:.2f} ms", f"{x['measured_period_ms']:.2f} ms",
                    f"{100 * x['error']:+.0f} %",
                ]
            )  # fmt: skip
    lines += [to_table(head, cells)]
    errors = [abs(x["error"]) for row in data["against"] for x in row["ours"].values()]
    lines += [
        "Milliseconds per micro-batch, filling and draining included, in rounds in turns; results",
        "of ours travel back to rank 0, the peer's stay where they are. Above 1 is faster than the",
        "peer. Operators at random are a plan that the peer cannot express, and two networks are",
        "slower than what the peer has. Periods in steady state; mean absolute error "
        f"{100 * float(np.mean(errors)):.0f} %.",
        "",
        f"Two network namespaces ({RATE} each way): {data['namespaces']}.",
        "",
        "## Faults",
        "",
    ]
    cells = [
        [x["fault"], f"{x['timeout_s']:g} s", f"{x['seconds']:.1f} s",
         "yes" if x["left_running"] else "no", " ".join(x["said"].split())]
        for x in data["faults"]
    ]  # fmt: skip
    head = ["fault", "timeout", "every process ended after", "left running", "rank 0 said"]
    lines += [to_table(head, cells)]
    lines += [f"- {k}: {v}" for k, v in data["made_on"].items()]
    return "\n".join(lines) + "\n"


def study(options: argparse.Namespace, command: str) -> None:
    """All parts."""
    torch.set_num_threads(1)
    machine = Cluster.detect()
    if len(machine.devices) < 2:
        raise ValueError("this study needs two cores")
    two = Cluster("two", machine.devices[:2])
    stacks = TINY if options.tiny else (STACKS[0], STACKS[2])
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        why_not = make_namespaces()
        try:
            say("links")
            near = links(folder, two, False)
            far = None if why_not else links(folder, two, True)
            data: dict[str, Any] = {
                "namespaces": f"not made here, {why_not}" if why_not else "made here"
            }
            say("equal results")
            small = TINY[0] if options.tiny else Stack("small", 4, (4, 16, 64), heads=4)
            data["equal"] = equal(folder, near, small, 4)
            data["against"] = []
            for stack in stacks:
                say(stack.name)
                row = against(folder, near, stack, options.micro_batches, options.rounds, far)
                data["against"].append(row)
            say("faults")
            data["faults"] = faults(folder, two, TINY[0], not why_not)
        finally:
            drop_namespaces()
    data["made_on"] = provenance(rounds=options.rounds, micro_batches=options.micro_batches)
    write_atomic(options.out / "distributed.json", json.dumps(data, indent=1) + "\n")
    text = report(data, command)
    write_atomic(options.out / "distributed.md", text)
    print(text)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="a model of a millisecond, as a test")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank:
        rank_main(options.rank)
        return 0
    words = " --tiny" if options.tiny else ""
    return launch(lambda: study(options, f"python -m experiments.distributed{words}"))


if __name__ == "__main__":
    sys.exit(main())
