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
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.fidelity import merged
from experiments.peers import STACKS, TINY, Peer, Stack, same_cut
from experiments.ranks import NAMESPACES, PATIENCE_S, Ranks, ended_late, start
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
from placement.workloads import load

RATE, LIMIT = "400mbit", "burst 64kb latency 50ms"
TIMEOUT_S = 5.0  # of the runs in which something fails
STEPS = 4  # of training


# --- a rank: a process of its own -----------------------------------------------------------------

STREAMED = "experiments.distributed:streamed"


def streamed(job: dict[str, Any], rank: int) -> Iterator[Any]:
    """Streams of a plan: rank 0 says how many phases it has, then when each item ended.

    It is told how often the job's items are to run, or ``forever``.
    """
    if "stack" in job:
        stack = Stack(**job["stack"])
        name, module = stack.name, stack.build()
        data: list[Any] = stack.items(job["micro_batches"])
    else:
        name = job["workload"]
        module, inputs = load(name)
        data = [inputs]
    graph, placement = capture(module, data[0], name=name), np.array(job["placement"], np.int32)
    pin(job["cluster"])
    with World.join(job["timeout_s"]) as world:
        runner = DistributedRunner(
            graph, job["cluster"], placement, world=world, max_in_flight=job["in_flight"],
            priority=job.get("priority"),
        )  # fmt: skip
        if rank:
            runner.serve()
            return
        with runner:
            outputs = list(runner.stream(data if "stack" in job else data * 4))  # it starts
            if "stack" in job:
                np.save(job["folder"] / "outputs.npy", torch.cat(outputs).numpy())
            text = yield runner.num_phases
            while True:
                feed = itertools.cycle(data) if text == "forever" else data * int(text)
                began = time.perf_counter()
                text = yield [time.perf_counter() - began for _ in runner.stream(feed)]


def trained(job: dict[str, Any], rank: int) -> Iterator[Any]:
    """Training: rank 0 answers with the losses of four steps."""
    module, pairs, loss, optimizer = training_of(Stack(**job["stack"]), job["micro_batches"])
    graph = capture(module, pairs[0], mode="training", loss=loss, optimizer=optimizer)
    # Backward is where its forward is: by the block that an operator belongs to.
    block = [int((p.removeprefix("module.") or "0").split(".")[0]) for p in graph.op_module]
    _, first, member = np.unique(graph.group, return_index=True, return_inverse=True)
    place = (np.array(block) >= (max(block) + 1) // 2)[first][member].astype(np.int32)
    with World.join(60.0) as world:
        trainer = DistributedTrainer(graph, job["cluster"], place, optimizer, world=world)
        if rank:
            trainer.serve()
            return
        losses = [trainer.step(pairs).tolist() for _ in range(STEPS)]
        trainer.close()
    yield losses


def training_of(stack: Stack, num_batches: int) -> tuple[nn.Module, list[Any], Any, Any]:
    """A stack that is to reverse its batches: module, micro-batches, loss and optimizer."""
    module = stack.build().train()
    pairs = [(x, x.flip(0)) for x in stack.items(num_batches)]
    return module, pairs, nn.functional.mse_loss, torch.optim.AdamW(module.parameters(), lr=1e-3)


class Ours(Ranks):
    """A plan of a stack, whose processes wait while others run."""

    def __init__(
        self, cluster: Cluster, placement: Any, stack: Stack, num_batches: int, **more: Any
    ) -> None:
        job = {
            "stack": asdict(stack), "placement": np.asarray(placement).tolist(),
            "micro_batches": num_batches, "timeout_s": more.pop("timeout_s", 60.0), "in_flight": 4,
        }  # fmt: skip
        super().__init__(STREAMED, cluster, job, **more)

    def run(self) -> tuple[float, float]:
        """Seconds of all micro-batches, and of a period."""
        ends = self.ends(1)
        return ends[-1], float(steady_period(np.array(ends)))

    def difference(self, expected: np.ndarray[Any, Any]) -> float:
        return float(np.abs(np.load(self.folder / "outputs.npy") - expected).max())


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


def links(cluster: Cluster, namespaces: bool) -> Cluster:
    """The cluster with the links that two ranks measure."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        there, devices = folder / "links.yaml", folder / "devices.yaml"
        cluster.to_yaml(devices)
        command = [sys.executable, "-m", "placement", "profile", "--distributed", "--cluster"]
        command += [str(devices), "--cluster-out", str(there)]
        errors = [folder / f"{r}.err" for r in range(2)]
        for error, process in zip(errors, start(command, errors, namespaces), strict=True):
            process.communicate(timeout=PATIENCE_S)
            if process.returncode:
                raise RuntimeError(error.read_text()[-2000:])
        return Cluster.from_yaml(there)


# --- the parts of the study -----------------------------------------------------------------------


def equal(cluster: Cluster, stack: Stack, num_batches: int) -> dict[str, float]:
    """Largest difference from the plain module: outputs with 2 and 4 processes, losses with 2."""
    data = stack.items(num_batches)
    graph = capture(stack.build(), data[0], name=stack.name)
    expected = plain_outputs(stack, data)
    differences = {}
    block = np.array([int(p.split(".")[0]) for p in graph.op_module])
    for size in (2, 4):
        named = [replace(cluster.devices[i % 2], name=f"cpu:{i}") for i in range(size)]
        place = block * size // (block.max() + 1)
        with Ours(Cluster("four", tuple(named)), place, stack, num_batches) as ranks:
            ranks.answer()
            differences[f"outputs, {size} processes"] = ranks.difference(expected)
    job = {"stack": asdict(stack), "micro_batches": num_batches}
    with Ranks("experiments.distributed:trained", cluster, job) as ranks:
        losses = ranks.answer()
    module, pairs, loss, optimizer = training_of(stack, num_batches)
    plain = [plain_step(module, optimizer, pairs, loss).tolist() for _ in range(STEPS)]
    far = float(np.abs(np.subtract(losses, plain)).max())
    return differences | {f"training losses of {STEPS} steps, 2 processes": far}


def plain_outputs(stack: Stack, data: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    """What the module computes without us."""
    module = stack.build()
    with torch.no_grad():
        return torch.cat([module(x) for x in data]).numpy()


def against(
    cluster: Cluster, stack: Stack, num_batches: int, rounds: int, slow: Cluster | None
) -> Iterator[dict[str, Any]]:
    """Throughput beside the peer's, and periods beside the predicted ones: a row per plan."""
    data = stack.items(num_batches)
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
        peer = opened.enter_context(Peer(stack, num_batches, cluster))
        ours = {
            name: opened.enter_context(
                Ours(plain, place, stack, num_batches, namespaces=linked is slow)
            )
            for name, (linked, place) in setups.items()
        }
        for ranks in ours.values():
            ranks.answer()
        ways = {"peer": lambda: (peer.run(), 0.0)} | {n: r.run for n, r in ours.items()}
        times = in_turns(ways, rounds, shift=True)
        expected = plain_outputs(stack, data)
        differences = {name: ranks.difference(expected) for name, ranks in ours.items()}
    # The machine changes its speed within minutes: what holds for the rounds lies in between.
    profile = merged([before, measure(graph, plain, repeats=5)])
    peer_s = times["peer"][:, 0]
    for name, (linked, place) in setups.items():
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
            "largest_difference": differences[name],
        }


def faults(cluster: Cluster, stack: Stack, can_drop: bool) -> Iterator[dict[str, Any]]:
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
        with Ours(plain, half, stack, 8, timeout_s=TIMEOUT_S, namespaces=by_cable) as ranks:
            ranks.answer()
            ranks.tell("forever", 0)
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


def rows(options: Options) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    two = two_cores()
    stacks = TINY if options.tiny else (STACKS[0], STACKS[2])
    small = TINY[0] if options.tiny else Stack("small", 4, (4, 16, 64), heads=4)
    why_not = make_namespaces()
    try:
        say("links")
        near = links(two, False)
        far = None if why_not else links(two, True)
        namespaces = f"not made here, {why_not}" if why_not else "made here"
        yield {"part": "namespaces", "said": namespaces}
        say("equal results")
        for what, value in equal(near, small, 4).items():
            yield {"part": "equal", "what": what, "difference": value}
        for stack in stacks:
            say(stack.name)
            batches, rounds = options.micro_batches, options.rounds
            for row in against(near, stack, batches, rounds, far):
                yield {"part": "against", **row}
        say("faults")
        for row in faults(two, TINY[0], not why_not):
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

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
