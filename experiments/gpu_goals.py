"""What a run on a GPU was to show, and what it has shown, from the lines that it wrote."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from experiments.tables import number, to_table


def table(lines: Sequence[str]) -> str:
    """A table per section and kind of row."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        row = json.loads(line)
        del row["at"]
        sections.setdefault(row.pop("section"), []).append(row)
    texts = []
    for name, rows in sections.items():
        texts.append(f"\n### {name}\n")
        for columns in dict.fromkeys(map(tuple, rows)):
            alike = [row.values() for row in rows if tuple(row) == columns]
            cells = [[number(v, 4) if isinstance(v, float) else str(v) for v in r] for r in alike]
            texts.append(to_table(columns, cells))
    return "\n".join(texts) + "\n### goals\n\n" + goals([json.loads(line) for line in lines])


# Sections of the second command, which the first runs on a GPU did not have.
LATER = frozenset({"ahead", "compiled", "streaming", "pieces", "learning"})


def kind_of(section: str) -> str:
    """``correct`` of ``correct_3``."""
    return section.partition("_")[0]


def span(values: Sequence[float], scale: float = 1.0, unit: str = "") -> str:
    low, high = (number(f(values), 3, scale, unit) for f in (min, max))
    return low if low == high else f"{low} to {high}"


percent = partial(span, scale=100, unit=" %")


def listed(values: Sequence[float], digits: int = 3, unit: str = "") -> str:
    return ", ".join(number(x, digits, unit=unit) for x in values)


def counted(oks: Sequence[Any]) -> str:
    return f"{sum(oks)} of {len(oks)}"


class Goals:
    """Lines of the table: what was to be shown, the goal, what was reached, if that is enough."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows
        self.lines: list[tuple[str, str, str, bool | None]] = []

    def of(self, section: str, name: str, item: str = "") -> list[float]:
        mine = [r for r in self.rows if kind_of(r["section"]) == section and item in r["item"]]
        return [r[name] for r in mine if isinstance(r.get(name), int | float)]

    def add(
        self,
        what: str,
        goal: str,
        values: Sequence[Any],
        wanted: int,
        reached: Any,
        met: Any = None,
    ) -> None:
        """``reached`` and ``met`` of the values, of which so many are ``wanted``."""
        text = reached(values) if values else "nothing"
        text += f"; {len(values)} of {wanted} were done" if len(values) < wanted else ""
        enough = None if met is None else bool(len(values) >= wanted and met(values))
        self.lines.append((what, goal, text, enough))


def goals(rows: Sequence[dict[str, Any]]) -> str:
    """What was to be shown, what was, and whether that is enough."""
    shown = Goals(rows)
    of, add = shown.of, shown.add
    more = not LATER.isdisjoint(kind_of(r["section"]) for r in rows)
    short = 14 if more else 2  # models with memory for a share of them
    results, many = [r["ok"] for r in rows if "way" in r], of("correct", "ok", "many")
    add("results of 12 models", "all equal, the same bits twice", results, 96, counted, all)
    add("300 micro-batches", "no fault", many, 1, counted, all)
    add("training: losses and parameters", "all equal", of("train", "ok"), 15, counted, all)
    add("errors are said", "3", of("errors", "ok") + of("index", "ok"), 3, counted, all)
    for what, name in (
        ("GPU time that is dispatch", "dispatch_share"),
        ("operators that the CPU does faster", "cpu_faster_share"),
    ):
        add(f"profile: share of {what}", "6 models", of("profile", name), 6, percent, any)
    for what in ("latency", "period"):
        add(f"{what} predicted, median error", "at most 10 %, aim 5 %",
            of("fidelity", f"{what}_error"), 3, percent, lambda v: max(v) <= 0.10)  # fmt: skip
        add(f"{what} predicted, rank correlation", "at least 0.95",
            of("fidelity", f"{what}_rank"), 3, span, lambda v: min(v) >= 0.95)  # fmt: skip
        for name, says, least in (
            ("gpu_over_eager", "GPU alone over eager PyTorch", 0.95),
            ("graphs_over_graph", "graphs per run over one graph", 0.8),
            ("plan_over_single", "plan over the best device", 0.98),
        ):
            goal = f"at least {least}x" + (" (published: 1.125x)" if least == 0.98 else "")
            enough = partial(lambda v, least: min(v) >= least, least=least)
            add(f"{what}: {says}", goal, of("plans", name, what), 6, span, enough)
        add(f"{what}: the planner's answer, before it had run, over the best device", "named",
            of("plans", "planned_over_single", what), 6, span)  # fmt: skip
        add(f"{what}: what optimize keeps, CUDA graphs too, over eager PyTorch", "named",
            of("plans", "kept_over_eager", what), 6, span)  # fmt: skip
        if home := of("plans", "home_over_single", what):
            add(f"{what}: planned at home, over the best device", "named", home, 6, span)
    graphs = [str(r.get("way", r["item"] if r["section"] == "train" else "")) for r in rows]
    equal = [r["ok"] for r, x in zip(rows, graphs, strict=True) if "CUDA graphs" in x and "ok" in r]
    add("CUDA graphs: results", "named; all equal: optimize may try them", equal, 41, counted)
    add("half of the memory: results", "all equal", of("memory", "ok"), 3, counted, all)
    add("half of the memory: plan over accelerate", "faster",
        of("memory", "plan_over_accelerate"), 2, span, lambda v: min(v) > 1)  # fmt: skip
    add("half of the memory: plan over the CPU alone", "at least 0.98x",
        [r["cpu_ms"] / r["plan_ms"] for r in rows if {"cpu_ms", "plan_ms", "model_mib"} <= {*r}],
        short, span, lambda v: min(v) >= 0.98)  # fmt: skip
    # A row of "optimize" is one that failed, beside that of its model.
    add("another plan where memory is short", "none is out of memory",
        ["model_mib" in r for r in rows if "model_mib" in r
         or (r["item"].endswith("optimize") and "OutOfMemory" in r.get("failed", ""))],
        short, counted, all)  # fmt: skip
    add("resnet50_b32: period, launched one by one, over its kernels", "at least 0.98x",
        [x / y for x in of("plans", "gpu_ms", "resnet50_b32, period")
         for y in of("profile", "kernels_ms", "resnet50_b32")], 1, span,
        lambda v: min(v) >= 0.98)  # fmt: skip
    if more:
        second_command(shown)
    else:
        what = "compiled runs, four budgets, pieces of a matrix, real runs"
        shown.lines.append((what, "named", "not run", None))
    add("peak memory predicted", "within 10 % of the allocator's",
        [x for part in ("plans", "memory", "streaming") for x in of(part, "predicted_off")], 8,
        percent, lambda v: max(map(abs, v)) <= 0.10)  # fmt: skip
    add("training with half of the activations", "runs, losses equal",
        of("training", "ok", "half"), 2, counted, all)  # fmt: skip
    add("training step: eager, GPU, CUDA graph, half recomputed, half CPU", "named",
        of("training", "step_ms"), 5, partial(listed, unit=" ms", digits=1))  # fmt: skip
    add("watts at rest, with a context", "named", of("energy", "watts", "rest"), 1, span)
    add("joules per micro-batch: CPU, GPU, CUDA graphs, plan if it uses both", "named",
        of("energy", "gpu_j_per_microbatch"), 3, listed)  # fmt: skip
    add("learning on the GPU over the CPU", "named", of("policy", "gpu_over_cpu"), 2, span)
    met = {True: "yes", False: "no", None: "–"}
    head = ("what", "goal", "reached", "met")
    return f"{origin(rows)}\n\n{to_table(head, [(*x[:3], met[x[3]]) for x in shown.lines])}"


def second_command(shown: Goals) -> None:
    """What only the second command asks: compiled runs, four budgets, pieces, real runs."""
    of, add = shown.of, shown.add
    for what in ("latency", "period"):
        add(f"{what}: what optimize keeps, compiled too, over reduce-overhead",
            "at least 0.95x",
            of("compiled", "kept_over_torch", what), 6, span,
            lambda v: min(v) >= 1 / 1.05)  # fmt: skip
    for what, models in (("reduce-overhead", 6), ("max-autotune", 2), ("ours", 6)):
        add(f"seconds of compiling, six models at a time: {what}", "named",
            of("ahead", "compile_s", what), models, span)  # fmt: skip
    add("compiled runs of a GPU, of these models", "named",
        of("compiled", "compiled", "period"), 6, lambda v: f"{sum(v)}")  # fmt: skip
    add("some of the memory: results", "all equal", of("streaming", "ok"), 12, counted, all)
    for budget in ("half", "quarter"):
        add(f"memory for a {budget}: plan over the best of the others",
            "at least 1.3x on two of three models, never below 0.98x",
            of("streaming", "plan_over_others", budget), 3, partial(listed, unit="x"),
            lambda v: sorted(v)[-2] >= 1.3 and min(v) >= 0.98)  # fmt: skip
    for name, what, goal, enough in (
        ("of_bound", "the plan's share of what the machine can do", "at least 85 %",
         lambda v: min(v) >= 0.85),
        ("latency_off", "latency predicted", "within 10 %", lambda v: max(map(abs, v)) <= 0.10),
    ):  # fmt: skip
        both = [x for budget in ("half", "quarter") for x in of("streaming", name, budget)]
        add(f"memory for a half and a quarter: {what}", goal, both, 6, percent, enough)
    for room in ("all", "half"):
        ms = {r["item"].rpartition(", ")[2]: r["plan_ms"] for r in shown.rows
              if r["section"] == "pieces" and room in r["item"] and "plan_ms" in r}  # fmt: skip
        gains = [ms["whole"] / x for way, x in ms.items() if way != "whole" and "whole" in ms]
        add(f"one matrix, memory for {room}: equal pieces, by speed, over whole", "named",
            gains, 2, partial(listed, unit="x"))  # fmt: skip
    add("learning from runs, over the better device", "named",
        [f"{r['item'].partition(', ')[2]} {number(r['gain'], 2, unit='x')} of {r['ran']}"
         for r in shown.rows if "gain" in r], 5, "; ".join)  # fmt: skip


def origin(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence: when each run was, how long it took, of which sections, and on what."""
    known = {r["item"]: r for r in rows if r["section"] == "facts"}

    def fact(item: str, name: str) -> str:
        return str(known.get(item, {}).get(name, "unknown"))

    began = [r["began"] for r in rows if "began" in r] or ["unknown"]
    runs = []
    for when in began:
        own = [r for r in rows if r.get("run", when) == when]
        took = f"{max((r['at'] for r in own if 'at' in r), default=math.nan):.0f} s"
        sections = dict.fromkeys(kind_of(r["section"]) for r in own)
        runs.append(f"{when}, {took}" + (f" ({', '.join(sections)})" if len(began) > 1 else ""))
    return (
        f"Run{'s' * (len(runs) > 1)} of {'; '.join(runs)}: {fact('cuda:0', 'model')} beside "
        f"{fact('cpu:0', 'cores')} cores of {fact('cpu:0', 'model')}, driver "
        f"{card_of(rows)['driver']}, torch {fact('versions', 'torch')}."
    )


def card_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What ``nvidia-smi`` told of the card."""
    texts = [str(r.get("text", "")) for r in rows if r["item"] == "nvidia-smi"] or [""]
    names = ("driver", "highest_clock", "clock", "power_limit")
    values = map(str.strip, texts[-1].split(",")[2:6])
    return dict(itertools.zip_longest(names, values, fillvalue="unknown"))
