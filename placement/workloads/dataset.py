"""A data set: graphs of many models with the time of every operator on the devices at hand.

``build`` makes or extends one, ``load`` gives its graphs as problems, ``summary`` counts. A data
set is a folder: one file ``<machine>/<graph>.json.gz`` per graph, a problem file (see
``placement.importers.problem_file``) that is compressed, so every command that takes a problem
takes it. What a problem file has no word for is in its ``provenance``: ``docs/latency.md``.
"""

from __future__ import annotations

import gc
import json
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from placement import importers, workloads
from placement.cluster import Cluster, Device, Link, from_record
from placement.graph import OpGraph
from placement.problem import Problem
from placement.profile import Profile
from placement.tools.files import check_writable, parse_json, read_text, write_atomic
from placement.tools.progress import Progress
from placement.workloads import zoo

if TYPE_CHECKING:
    from torch import nn

    from placement.executor import Runner

Floats = NDArray[np.float64]

VERSION = 1
FEW_ROUNDS = 3  # of a large graph, and of one whose every operator was measured in another one
KINDS = {  # of the shipped workloads, by file
    "bert": "encoder", "convnext": "cnn", "dlrm": "recommendation", "gpt2": "decoder",
    "inception": "cnn", "lstm": "recurrent", "resnet": "cnn", "t5": "encoder-decoder",
    "tiny": "toy", "vit": "vit",
}  # fmt: skip


_SAME_NAME = (
    "{0.told!r} and {1.told!r} in {where} are both called {0.name!r}, which is the name of their "
    "file: give one's function another name, or build it in another folder"
)


class DatasetError(ValueError):
    """The list of models or the folder of a data set is wrong; the message says where."""


@dataclass(frozen=True)
class Entry:
    """A graph that the data set shall have: ``placement.workloads.load(spec, **options)``.

    Attributes:
        kind: of the model, e.g. ``cnn``.
        family: what its graphs have in common with no others, e.g. ``resnet``.
    """

    spec: str
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "other"
    family: str = ""

    @property
    def name(self) -> str:
        """``resnet50-batch2``: of the graph, and of its file."""
        words = [
            f"{k}{v}" if isinstance(v, int | float) else str(v) for k, v in self.options.items()
        ]
        function = self.spec.partition(":")[2] or self.spec
        return re.sub(r"[^\w.+-]+", "_", "-".join([function, *words]))

    @property
    def told(self) -> str:
        """``resnet50 batch=2``: as it is written in a list."""
        return " ".join([self.spec, *(f"{k}={json.dumps(v)}" for k, v in self.options.items())])


def default_entries() -> tuple[Entry, ...]:
    """Every shipped workload with batches 1 and 2, and all of the zoo in two sizes.

    All models come in their first size before any comes in its second, so that what was built
    within a time budget has some of every kind.
    """
    entries: list[Entry] = []
    for i in range(2):
        for m in zoo.MODELS:
            batch, size = m.sizes[i]
            options = {"model": m.name, "batch": batch, "size": size}
            entries.append(Entry("placement.workloads.zoo:small", options, m.kind, m.name.lower()))
        for name, home in workloads.family_of().items():
            entries.append(Entry(name, {"batch": i + 1}, KINDS.get(home, "other"), home))
    return tuple(entries)


def read_list(path: str | Path) -> tuple[Entry, ...]:
    """The models of a text file: a workload and its options on each line, ``#`` for comments.

    ::

        resnet50 batch=8
        my_package.my_models:build width=64   # any function that gives (module, inputs)

    Raises:
        DatasetError: not readable, a word that is no option, or no model at all.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read as a list of models: {error}") from error
    entries = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        wrong = [word for word in words[1:] if not word.partition("=")[1]]
        if wrong:
            raise DatasetError(f"{path}:{number}: {wrong[0]!r} is not an option: write key=value")
        pairs = (word.split("=", 1) for word in words[1:])
        options = {key: value_of(text) for key, text in pairs}
        function = words[0].partition(":")[2] or words[0]
        entries.append(Entry(words[0], options, family=str(options.get("model", function)).lower()))
    if not entries:
        raise DatasetError(f"{path}: names no model; write one on each line, e.g. resnet50 batch=8")
    return tuple(entries)


def value_of(text: str) -> Any:
    """What an option is that was written as ``text``: a number, a truth value, or a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def this_machine() -> Cluster:
    """What is measured: the processor with one thread and with two, and every GPU.

    The devices of the processor share cores, so they are measured one after another.
    """
    here = Cluster.detect(max_cpu_devices=2)
    host = [d for d in here.devices if d.kind == "cpu"]
    cores = [core for d in host for core in d.cores][:2]
    memory, model = sum(d.memory_bytes for d in host), host[0].model
    devices = [
        Device(f"cpu-{n}-thread{'s' * (n > 1)}", "cpu", tuple(cores[:n]), n, memory, model=model)
        for n in range(1, len(cores) + 1)
    ]
    cluster = Cluster("", (*devices, *(d for d in here.devices if d.kind != "cpu")))
    # Not the host's name: two machines can have the same.
    name = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    # Of a GPU another amount of memory is free each time.
    lasting = [
        replace(d, memory_bytes=Device.memory_bytes) if d.kind == "cuda" else d
        for d in cluster.devices
    ]
    digest = replace(cluster, devices=tuple(lasting)).fingerprint[:8]
    return replace(cluster, name=f"{name}-{digest}")


@dataclass(frozen=True)
class Built:
    """What ``build`` did, by names of graphs.

    Attributes:
        made, kept: measured now, and before.
        failed: reasons of those that could not be captured or measured.
        left: not begun within the time.
    """

    made: tuple[str, ...]
    kept: tuple[str, ...]
    failed: Mapping[str, str]
    left: tuple[str, ...]


def build(
    entries: Sequence[Entry],
    folder: str | Path,
    *,
    cluster: Cluster | None = None,
    seconds: float = np.inf,
    repeats: int = 10,
    progress: Progress | None = None,
) -> Built:
    """Capture and measure what ``folder`` has not yet; a model that fails is left out.

    Every graph is a file as soon as it is measured, so whatever ends this, the same call
    continues. A graph that has operators (by signature) that no graph of this machine in the
    folder had runs ``repeats`` times on every device; one without, or that takes 0.1 s, only
    ``FEW_ROUNDS`` times.

    Args:
        cluster: devices of this machine, by default ``this_machine()``; its name is a folder.
        seconds: no further graph is begun when they are over.

    Raises:
        DatasetError: no models, or no time; two models of one name, or a name that the folder has
            for another one.
        ProfileError: a device of the cluster is not on this machine.
        FileError: the folder cannot be written.
    """
    if not entries or repeats < 1 or not seconds > 0:
        raise DatasetError(
            f"a data set needs models ({len(entries)} given), at least one round (repeats = "
            f"{repeats}) and time (seconds = {seconds})"
        )
    began, say = time.monotonic(), progress or (lambda what, share: None)
    cluster = cluster or this_machine()
    home = Path(folder) / cluster.name
    check_writable(home / "machine.json")
    wanted: dict[str, Entry] = {}
    for entry in entries:
        if wanted.setdefault(entry.name, entry).told != entry.told:
            raise DatasetError(_SAME_NAME.format(entry, wanted[entry.name], where="the list"))
    signatures, finished = _known(home, wanted)
    links = _links(home, cluster, say)
    measured: list[str] = []
    failed: dict[str, str] = {}
    todo = [entry for name, entry in wanted.items() if name not in finished]
    for number, entry in enumerate(todo):
        if time.monotonic() - began >= seconds:
            break
        say(f"{entry.name} ({number + 1} of {len(todo)}, {len(failed)} failed)", number / len(todo))
        try:
            problem = _measured(entry, cluster, links, signatures, repeats)
        except Exception as error:  # of anybody's model: the others go on
            failed[entry.name] = f"{type(error).__name__}: {error}"
            continue
        importers.save(problem, home / f"{entry.name}{importers.SUFFIX}")
        signatures.update(problem.graph.op_signature)
        measured.append(entry.name)
        gc.collect()  # modules refer to themselves; two of the large ones need not fit
    begun = {*measured, *failed, *finished}
    return Built(
        tuple(measured), finished, failed, tuple(name for name in wanted if name not in begun)
    )


def _known(home: Path, wanted: Mapping[str, Entry]) -> tuple[set[str], tuple[str, ...]]:
    """Signatures that were measured on this machine, and which graphs are there."""
    signatures: set[str] = set()
    finished = []
    for path in sorted(home.glob(f"*{importers.SUFFIX}")):
        try:
            problem = importers.load(path)
        except importers.FormatError:  # damaged: measured again
            continue
        signatures.update(problem.graph.op_signature)
        entry = wanted.get(path.name.removesuffix(importers.SUFFIX))
        if entry is not None:
            facts = problem.profile.provenance
            earlier = Entry(facts.get("spec", entry.spec), facts.get("options", entry.options))
            if earlier.told != entry.told:
                raise DatasetError(_SAME_NAME.format(entry, earlier, where=path))
            finished.append(entry.name)
    return signatures, tuple(finished)


def _links(home: Path, cluster: Cluster, say: Progress) -> tuple[Link, ...]:
    """Links between the kinds of devices, from ``machine.json``, or measured and written there.

    Between two devices of the processor: as between two cores that are none of the other's.
    """
    path = home / "machine.json"
    try:
        return tuple(
            from_record(Link, x) for x in parse_json(read_text(path), infinite=True)["links"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        say("links", None)
    from placement.costs.measure import measure_links

    here = Cluster.detect(max_cpu_devices=2)
    by_pair = {(x.src, x.dst): x for x in measure_links(here)}
    hosts = [d.name for d in here.devices if d.kind == "cpu"]
    links = []
    for a in cluster.devices:
        for b in cluster.devices:
            src = hosts[0] if a.kind == "cpu" else a.name
            dst = b.name if b.kind != "cpu" else hosts[-1] if a.kind == "cpu" else hosts[0]
            if a is not b and (src, dst) in by_pair:
                links.append(replace(by_pair[src, dst], src=a.name, dst=b.name))
    facts = {"devices": [asdict(d) for d in cluster.devices], "links": [asdict(x) for x in links]}
    write_atomic(path, json.dumps(facts | {"provenance": _provenance()}, indent=1) + "\n")
    return tuple(links)


def settle(module: nn.Module, inputs: Any) -> None:
    """Give batch normalisations the statistics of ``inputs``, as training would have.

    With random weights and without it, the values of a deep network become so small that a
    processor takes ten times as long for them (subnormal numbers), which no trained model does.
    """
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm

    from placement.program import split_inputs

    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return
    before = [(m.training, m.momentum) for m in norms]
    args, kwargs = split_inputs(inputs)
    for m in norms:
        m.train()
        m.momentum = 1.0
    # One value in a channel has no variance: what comes then stays as it is.
    with torch.no_grad(), suppress(ValueError):
        module(*args, **kwargs)
    for m, (training, momentum) in zip(norms, before, strict=True):
        m.training, m.momentum = training, momentum


def _measured(
    entry: Entry, cluster: Cluster, links: tuple[Link, ...], signatures: set[str], repeats: int
) -> Problem:
    from placement.capturing import capture

    began, load_before = time.time(), round(os.getloadavg()[0], 2)
    module, inputs = workloads.load(entry.spec, **entry.options)
    settle(module, inputs)
    graph = capture(module, inputs, name=entry.name)
    captured = time.time()
    rounds = repeats if set(graph.op_signature) - signatures else min(repeats, FEW_ROUNDS)
    order, samples = _alone(graph, cluster, rounds)
    from placement.costs.measure import typical

    low, high = np.percentile(samples, [25, 75], axis=0)
    whole, least = (  # rounds of the graph, and the fastest run of each operator, by device
        dict(zip(cluster.device_names, _rounded(x.T).tolist(), strict=True))
        for x in (samples.sum(axis=1), samples.min(axis=0))
    )
    facts = {
        "dataset": VERSION,
        "kind": entry.kind,
        "family": entry.family,
        "spec": entry.spec,
        "options": dict(entry.options),
        "order": order,
        "repeats": len(samples),
        "whole_s": whole,
        "least_s": least,
        "load_before": load_before,
        "capture_seconds": round(captured - began, 2),
        "measure_seconds": round(time.time() - captured, 2),
    }
    profile = Profile(
        device_names=cluster.device_names,
        compute_s=_rounded(typical(samples)),
        spread_s=_rounded(high - low),
        links=links,
        graph_fingerprint=graph.fingerprint,
        provenance=_provenance() | facts,
    )
    return Problem(graph.without_program(), cluster, profile)


def _alone(graph: OpGraph, cluster: Cluster, rounds: int) -> tuple[str, Floats]:
    """The order of the operators, and float64 ``[R, N, D]`` seconds; one device at a time."""
    from placement.costs.measure import better_order, check_here, on_one_device, run_seconds

    check_here(cluster)
    inputs = graph.program.timing_inputs()
    order, priority = better_order(graph, cluster, inputs)
    samples = np.empty((rounds, graph.num_ops, cluster.num_devices))
    runners: list[Runner] = []
    try:
        for r in range(rounds):
            # Where its tensors happen to lie makes a model 10 % faster or slower for as long as
            # they lie there. Large models have enough of them to be all alike.
            is_large = r > 0 and samples[r - 1].sum(axis=0).max() >= 0.1
            if is_large and r >= FEW_ROUNDS:
                return order, samples[:r]
            if not is_large:
                while runners:
                    runners.pop().close()
                for d in range(cluster.num_devices):
                    runners.append(on_one_device(graph, cluster, d, priority))
                    run_seconds(runners[d], inputs, 2)
            for d, runner in enumerate(runners):
                # The first of the two finds the caches as another device left them.
                samples[r, :, d] = run_seconds(runner, inputs, 2)
    finally:
        while runners:
            runners.pop().close()
    return order, samples


def _provenance() -> dict[str, Any]:
    from placement.costs.measure import provenance

    facts = {k: v for k, v in provenance().items() if k != "host"}  # nobody else's business
    return facts | {"transformers": workloads.import_transformers().__version__}


def _rounded(values: Floats) -> Floats:
    """To four digits: more would be noise, and noise does not compress."""
    return np.vectorize(lambda x: float(f"{x:.4g}"), otypes=[np.float64])(values)


def files(folder: str | Path) -> dict[str, Path]:
    """The graphs of a data set by ``<machine>/<graph>``, sorted.

    Raises:
        DatasetError: the folder holds none.
    """
    home = Path(folder)
    paths = {
        path.relative_to(home).as_posix().removesuffix(importers.SUFFIX): path
        for path in sorted(home.glob(f"*/*{importers.SUFFIX}"))
    }
    if not paths:
        raise DatasetError(
            f"{folder}: no data set (no <machine>/<graph>{importers.SUFFIX}); make one: "
            "placement dataset build default --out FOLDER"
        )
    return paths


def load(folder: str | Path, cluster: Cluster | None = None) -> dict[str, Problem]:
    """The graphs of a data set as problems, by ``<machine>/<graph>``.

    Args:
        cluster: devices in terms of those that were measured (``like: cpu-1-thread``, with a
            ``speed``); None: those that were measured.

    Raises:
        DatasetError: the folder holds no data set.
        FormatError: a file is damaged, or its links or devices make no sense.
        ProfileError: ``cluster`` has a device like none that was measured.
    """
    problems = {name: importers.load(path) for name, path in files(folder).items()}
    if cluster is None:
        return problems
    return {
        name: replace(p, cluster=cluster, profile=p.profile.for_cluster(cluster))
        for name, p in problems.items()
    }


@dataclass(frozen=True)
class Operators:
    """What is known of one operator signature on one device of one machine.

    Attributes:
        seconds: median over its occurrences; ``spread_s``: median of their interquartile ranges.
        occurrences: operators of that signature, ``graphs`` that they are in.
    """

    signature: str
    kind: str
    machine: str
    device: str
    seconds: float
    spread_s: float
    occurrences: int
    graphs: int


def operators(problems: Mapping[str, Problem]) -> tuple[Operators, ...]:
    """One row for each distinct signature and device of the problems that ``load`` gives."""
    samples: dict[tuple[str, str, str], list[tuple[float, float, str]]] = {}
    kind_of: dict[str, str] = {}
    for name, problem in problems.items():
        graph, profile = problem.graph, problem.profile
        kind_of |= dict(zip(graph.op_signature, graph.op_kind, strict=True))
        for d, device in enumerate(profile.device_names):
            for n, signature in enumerate(graph.op_signature):
                key = (signature, problem.cluster.name, device)
                times = profile.compute_s[n, d], profile.spread_s[n, d]
                samples.setdefault(key, []).append((*times, name))
    rows = []
    for (signature, machine, device), each in samples.items():
        seconds, spreads, names = zip(*each, strict=True)
        median, spread = float(np.median(seconds)), float(np.median(spreads))
        where = signature, kind_of[signature], machine, device
        rows.append(Operators(*where, median, spread, len(each), len(set(names))))
    return tuple(rows)


@dataclass(frozen=True)
class Summary:
    """Figures of a data set.

    Attributes:
        kinds: graphs, operators and families of every kind of model.
        num_signatures: distinct ones, over all machines.
        seconds: that capturing and measuring took.
        num_bytes: of the files.
        spread: median over operators and devices of the interquartile range over the time.
        whole_spread: median over graphs and devices of the same of a whole run.
        damaged: files that cannot be read, with the reason.
    """

    kinds: Mapping[str, tuple[int, int, int]]
    machines: Mapping[str, tuple[str, ...]]
    num_graphs: int
    num_ops: int
    num_signatures: int
    seconds: float
    num_bytes: int
    spread: float
    whole_spread: float
    damaged: Mapping[str, str]


def summary(folder: str | Path) -> Summary:
    """Count what is in a data set; damaged files are named.

    Raises:
        DatasetError: the folder holds no data set.
    """
    paths = files(folder)
    graphs: Counter[str] = Counter()
    ops: Counter[str] = Counter()
    families: dict[str, set[str]] = {}
    machines: dict[str, tuple[str, ...]] = {}
    signatures: set[str] = set()
    spreads, wholes = [np.empty(0)], []
    damaged: dict[str, str] = {}
    seconds = 0.0
    for name, path in paths.items():
        try:
            problem = importers.load(path)
        except importers.FormatError as error:
            damaged[name] = str(error)
            continue
        facts, profile = problem.profile.provenance, problem.profile
        kind = str(facts.get("kind", "other"))
        graphs[kind] += 1
        ops[kind] += problem.num_ops
        families.setdefault(kind, set()).add(str(facts.get("family", name)))
        machines[problem.cluster.name] = problem.cluster.device_names
        signatures.update(problem.graph.op_signature)
        seconds += sum(facts.get(f"{what}_seconds", 0.0) for what in ("capture", "measure"))
        spreads.append((profile.spread_s / np.maximum(profile.compute_s, 1e-9)).ravel())
        for runs in facts.get("whole_s", {}).values():
            low, middle, high = np.percentile(runs, [25, 50, 75])
            wholes.append((high - low) / middle)
    return Summary(
        kinds={k: (graphs[k], ops[k], len(families[k])) for k in sorted(graphs)},
        machines=machines,
        num_graphs=sum(graphs.values()),
        num_ops=sum(ops.values()),
        num_signatures=len(signatures),
        seconds=seconds,
        num_bytes=sum(path.stat().st_size for path in paths.values()),
        spread=float(np.median(np.concatenate(spreads))) if graphs else 0.0,
        whole_spread=float(np.median(wholes)) if wholes else 0.0,
        damaged=damaged,
    )
