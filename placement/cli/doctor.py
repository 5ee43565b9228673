"""``placement doctor``: what this machine offers, what is missing, and what to type next."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import re
import shlex
import shutil
import time
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from placement import cli
from placement.tools.ownership import DISTRIBUTION, version

EXAMPLE = """examples:
  placement doctor
  placement doctor --json
  placement doctor --warm       compile what the first commands need, a minute, and nothing else
  placement doctor --power --out cluster.yaml     watts of the devices, where there are meters

Exit code 1: something that every run needs is missing or cannot be written.
"""
NEEDED_BYTES = 2**30  # for profiles, plans and traces of a day
# Planners whose kernels the first commands need, slow ones first.
WARM: dict[str, dict[str, Any]] = {
    "policy": {"evaluations": 50},
    "best_of": {},
    "order_search": {"evaluations": 300},
    "macro_search": {"evaluations": 50},
}
NOT_KEPT = (
    "compiled kernels cannot be kept, every command compiles them anew (a minute): "
    "export NUMBA_CACHE_DIR=/a/folder/of/yours"
)
NO_COMPILER = (
    "there is no C++ compiler {name!r}: nothing is compiled (run --compiled, torch.compile), and "
    "runs as it is; apt install g++, or name another one: export CXX=clang++"
)
EXTRAS = {  # what there is not without them
    "cp": "no planner cp_sat and no search of schedules",
    "metis": "no planner metis",
    "plots": "no pictures",
    "models": "no models of Hugging Face",
    "latency": "no --predict trees",
    "onnx": "no ONNX files",
    "sweep": "no sweeps by joblib, SLURM or Optuna",
    "ray": "no sweeps by ray",
    "tensorboard": "no files for TensorBoard",
}
_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*(?:;.*?extra\s*==\s*['\"]([\w-]+)['\"])?")


def configure(parser: argparse.ArgumentParser) -> None:
    add = cli.adding(parser)
    add("--warm", "compile kernels now, not in the first commands", bool)
    add("--power", "measure watts of idle and of busy devices", bool)
    add("--cluster FILE", "with --power: devices (this machine)")
    add("--seconds S", "with --power: per device (2)", float)
    add("--out FILE", "with --power: devices with watts (YAML)")


def run(args: argparse.Namespace) -> int:
    if args.power:
        return _power(args)
    for name in ("cluster", "seconds", "out"):
        if getattr(args, name) is not None:
            raise cli.UsageError(f"--{name} is for --power: add it")
    if args.warm:
        from placement.tools.parallel import parallel_map

        folder = kept_in()
        if folder is None:
            raise cli.UsageError(NOT_KEPT)
        with cli.progress() as report:
            report("compiling the kernels", None)
            parallel_map(_compile, WARM, "processes")
        cli.say(f"kernels are compiled, and kept in {folder}")
        return cli.OK
    with cli.progress() as report:
        report("asking Python, torch and the machine", None)
        machine = facts()
    problems, hints = advice(machine)
    if args.json:
        cli.print_json({"ok": not problems, **machine, "problems": problems, "hints": hints})
    else:
        cli.print_table("what this machine offers", ["", "found"], rows(machine), figures=False)
        for line in problems:
            print(f"! {line}")
        for line in hints:
            print(f"- {line}")
        if not problems:
            print("next: placement profile tiny_mlp    (or your own package.module:function)")
    return cli.NO if problems else cli.OK


def _power(args: argparse.Namespace) -> int:
    """Watts of this machine's devices, measured where it has meters."""
    from placement.costs.power import measured

    cli.check_outputs(args.out)
    cluster = cli.cluster_of(args.cluster)
    with cli.progress() as report:
        report("nothing runs, then each device works", None)
        cluster = measured(cluster, seconds=2.0 if args.seconds is None else args.seconds)
    if args.out is not None:
        cluster.to_yaml(args.out)
    if args.json:
        names = ("name", "busy_w", "idle_w", "power_source")
        devices = [{name: getattr(d, name) for name in names} for d in cluster.devices]
        cli.print_json({"power_source": cluster.power_source, "devices": devices})
        return cli.OK
    rows = [
        [d.name, *(_watts(w) for w in (d.busy_w, d.idle_w)), d.power_source if d.busy_w else "-"]
        for d in cluster.devices
    ]
    cli.print_table(cluster.name, ["device", "busy W", "idle W", "source"], rows)
    if args.out is not None:
        out = shlex.quote(args.out)
        cli.say(f"devices written to {args.out}; next: placement plan ... --cluster {out}")
    return cli.OK


def _watts(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _compile(name: str) -> None:
    """Compile what a planner of ``WARM`` uses, as it does it."""
    from placement import planners
    from placement.objective import Objective
    from placement.testing import small_problems

    planner = planners.load(name, **WARM[name])
    each = small_problems()[::2]  # they come for two objectives, one after the other
    for problem, objective in itertools.product(each, Objective):
        with suppress(ValueError):  # it is for some objectives, and into one memory nothing fits
            planner(problem.with_objective(objective))


def facts() -> dict[str, Any]:
    """Everything that the machine was asked, as JSON; what cannot be found out is None."""
    from placement.tools.compiler import missing_compiler
    from placement.tools.files import FileError, cache_folder, check_writable

    others_s, begun = cli.others_s(), time.monotonic()
    folder, writable = cache_folder(), True
    try:
        check_writable(folder / "profiles" / "x.npz")
    except FileError:
        writable = False
    there = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    required, extras = packages()
    machine = {
        "version": version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "memory": _memory(),
        **_torch(),
        "kernels_cached": kept_in() is not None or has_kernels(),
        "missing_compiler": missing_compiler() or None,
        "cache": {
            "folder": str(folder),
            "writable": writable,
            "free_bytes": shutil.disk_usage(there).free,
            "num_profiles": len(list(folder.glob("profiles/*.npz"))),
        },
        "required": required,
        "extras": extras,
        "noise": noise(_timed_loops()),
    }
    worked_s = cli.others_s()
    load = None
    if others_s is not None and worked_s is not None:
        load = round(max(worked_s - others_s, 0.0) / (time.monotonic() - begun), 2)
    return machine | {"cpu": machine["cpu"] | {"load": load}}


def advice(machine: dict[str, Any]) -> tuple[list[str], list[str]]:
    """``(problems, hints)``: what must be mended, and what would be good to know."""
    problems, hints = [], []
    missing = [name for name, installed in machine["required"].items() if installed is None]
    if missing:
        problems.append(f"not installed: {', '.join(missing)}: pip install {DISTRIBUTION}")
    if machine["torch_error"]:
        problems.append(f"torch cannot be imported: {machine['torch_error']}")
    cache = machine["cache"]
    if not cache["writable"]:
        problems.append(
            f"profiles cannot be kept in {cache['folder']}: "
            "export PLACEMENT_HOME=/a/folder/of/yours"
        )
    elif cache["free_bytes"] < NEEDED_BYTES:
        problems.append(
            f"{_size(cache['free_bytes'])} free in {cache['folder']}: free some, or "
            "export PLACEMENT_HOME=/another/folder"
        )
    if not machine["kernels_cached"]:
        hints.append(NOT_KEPT)
    if machine["missing_compiler"]:
        hints.append(NO_COMPILER.format(name=machine["missing_compiler"]))
    if not machine["platform"].startswith("Linux"):
        hints.append(f"{machine['platform']} is not supported, Linux is: some commands fail here")
    cpu, noisy = machine["cpu"], machine["noise"]
    quota = cpu["quota_cores"]
    if quota is not None and quota < cpu["usable"]:
        hints.append(
            f"a limit of {quota:g} cores is shared by {cpu['usable']}: workers will be stopped "
            "now and then; use as many cores as the limit (taskset)"
        )
    if cpu["usable"] < 2 and not machine["gpus"]:
        hints.append("one core is one device: a pipeline needs two cores, or a GPU")
    if cpu["load"] is not None and cpu["load"] > cli.BUSY * cpu["usable"]:
        hints.append(
            f"other programs keep {cpu['load']:.1f} of {cpu['usable']} cores busy: what is "
            "measured now is too slow, and differs from run to run"
        )
    if noisy["slow_over_fast"] > 1.3:
        hints.append(
            f"timing is noisy: the same work takes up to {noisy['slow_over_fast']:.1f} times as "
            "long; use more rounds (placement profile --repeats 30), or wait for a quiet machine"
        )
    if cpu["governor"] not in (None, "performance"):
        hints.append(f"clock rates change (governor {cpu['governor']}): timings differ more")
    for name, parts in machine["extras"].items():
        lacking = [part for part, installed in parts.items() if installed is None]
        if lacking and name in EXTRAS:
            where = " into an environment of its own" if name == "ray" else ""
            hints.append(
                f"without {', '.join(lacking)}: {EXTRAS[name]}; if you need it: "
                f"pip install '{DISTRIBUTION}[{name}]'{where}"
            )
    return problems, hints


def rows(machine: dict[str, Any]) -> list[list[str]]:
    """What people read: a name, and what was found."""
    cpu, memory, cache = machine["cpu"], machine["memory"], machine["cache"]
    limit = memory["limit_bytes"]
    gpus = [f"{g['name']}, {g['model']}, {_size(g['memory_bytes'])}" for g in machine["gpus"]]
    no_gpu = "none" if machine["cuda_build"] else "none (torch is built for CPUs only)"
    load = "unknown" if cpu["load"] is None else f"{cpu['load']:.1f} of {cpu['usable']} cores"
    shown = {
        "version": f"{DISTRIBUTION} {machine['version']}, Python {machine['python']}",
        "processor": f"{cpu['model']}, {cpu['usable']} of {cpu['logical']} cores usable, "
        f"sockets: {cpu['sockets'] or 'unknown'}",
        "memory": f"{_size(memory['total_bytes'])}, {_size(memory['free_bytes'])} free"
        + (f", limit {_size(limit)}" if limit is not None else ""),
        "GPUs": "; ".join(gpus) or no_gpu,
        "devices": ", ".join(machine["devices"]) or "unknown",
        "load": f"{load}; the same work takes {machine['noise']['slow_over_fast']:.1f}x as long "
        "at times",
        "profiles": f"{cache['num_profiles']} in {cache['folder']}, "
        f"{_size(cache['free_bytes'])} free{'' if cache['writable'] else ', NOT WRITABLE'}",
        "packages": ", ".join(f"{k} {v or 'MISSING'}" for k, v in machine["required"].items()),
    }
    for name, parts in machine["extras"].items():
        shown[f"extra {name}"] = ", ".join(f"{k} {v or 'missing'}" for k, v in parts.items())
    return [[name, text] for name, text in shown.items()]


def packages() -> tuple[dict[str, str | None], dict[str, dict[str, str | None]]]:
    """``({package: version}, {extra: {package: version}})`` of what the distribution names.

    By its metadata; of a checkout that is not installed, by its ``pyproject.toml``.
    """
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        text = _read(str(Path(cli.__file__).parents[2] / "pyproject.toml")) or "project = {}"
        project = tomllib.loads(text)["project"]
        lines = list(project.get("dependencies", ()))
        for extra, names in project.get("optional-dependencies", {}).items():
            lines += [f'{name}; extra == "{extra}"' for name in names]
    required: dict[str, str | None] = {}
    extras: dict[str, dict[str, str | None]] = {}
    for line in lines:
        match = _REQUIREMENT.match(line)
        assert match is not None, line
        name, extra = match[1], match[2]
        (required if extra is None else extras.setdefault(extra, {}))[name] = _installed(name)
    return required, extras


def noise(seconds: list[float]) -> dict[str, float]:
    """How much the same work differs: its times at 95 % over those at 5 %."""
    import numpy as np

    fast, slow = np.percentile(seconds, [5, 95])
    return {"fast_s": float(fast), "slow_s": float(slow), "slow_over_fast": float(slow / fast)}


def kept_in() -> Path | None:
    """Where compiled kernels are kept: beside our files, or in a folder of the user; None: not."""
    try:
        from placement.tools.jit import kernel_folder
    except ImportError:  # without numba there are none
        return None
    return kernel_folder()


def has_kernels() -> bool:
    """Whether kernels were compiled beside our files: they serve who may not write there too."""
    return any(Path(cli.__file__).parents[1].rglob("*.nbi"))


def _timed_loops() -> list[float]:
    """Seconds of 150 equal pieces of work of about a millisecond each."""
    times = []
    for _ in range(150):
        began = time.perf_counter()
        sum(range(20_000))
        times.append(time.perf_counter() - began)
    return times


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    """What torch sees. An import of torch may fail in many ways; the first line says how."""
    nothing: dict[str, Any] = {"devices": [], "gpus": [], "cuda_build": None, "torch_error": None}
    try:
        import torch

        from placement.cluster import Cluster

        devices = Cluster.detect().devices
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        return nothing | {"torch_error": f"{type(error).__name__}: {first}"}
    keys = ("name", "model", "memory_bytes")
    gpus = [{key: getattr(d, key) for key in keys} for d in devices if d.kind == "cuda"]
    return nothing | {
        "devices": [d.name for d in devices],
        "gpus": gpus,
        "cuda_build": torch.version.cuda,
    }


def _cpu() -> dict[str, Any]:
    from placement.cluster import cpu_model

    logical = os.cpu_count() or 1
    can_tell = hasattr(os, "sched_getaffinity")
    usable = sorted(os.sched_getaffinity(0)) if can_tell else list(range(logical))
    topology = "/sys/devices/system/cpu/cpu{}/topology/{}"
    sockets = {_read(topology.format(c, "physical_package_id")) for c in usable} - {None}
    siblings = {_read(topology.format(c, "thread_siblings_list")) for c in usable} - {None}
    quota = (_read("/sys/fs/cgroup/cpu.max") or "max").split()
    return {
        "model": cpu_model(),
        "logical": logical,
        "usable": len(usable),
        "physical": len(siblings) or None,
        "sockets": len(sockets) or None,
        "quota_cores": None if quota[0] == "max" else int(quota[0]) / int(quota[1]),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    }


def _memory() -> dict[str, int | None]:
    lines = dict(re.findall(r"(\w+):\s+(\d+) kB", _read("/proc/meminfo") or ""))
    kib = {key: int(value) * 1024 for key, value in lines.items()}
    limit = _read("/sys/fs/cgroup/memory.max")
    return {
        "total_bytes": kib.get("MemTotal"),
        "free_bytes": kib.get("MemAvailable"),
        "limit_bytes": int(limit) if limit is not None and limit.isdecimal() else None,
    }


def _size(value: int | None) -> str:
    return "unknown" if value is None else cli.byte_size(value)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
