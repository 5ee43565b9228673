"""``docs/results.md``, its picture and ``docs/bench.md``, from results;
and tables of other pages, between ``<!-- figures: ... -->`` and ``<!-- end of figures -->``.

    python -m experiments.results            # writes them
    python -m experiments.results --check    # exit code 1 if one of the pages is not up to date

Nothing is measured here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import baselines, compiled, fidelity, gpu_results, leaderboard, pipelining, public
from experiments.grid import Cell, best_known, gain, ratios
from experiments.learned import dispatch, folds, gnn, split, zero_shot
from experiments.learned.problems import DRAWN, FAMILIES, REAL
from experiments.study import RESULTS, ROOT, filled, origin, say
from experiments.tables import DASH, Column, Mean, geometric, groups, read_csv, table
from placement.report import gantt
from placement.report.row import SINGLE
from placement.tools.files import write_atomic

DOCS = ROOT / "docs"
MOST_ROWS = 6
SHOPS = "shops"


class Trained(NamedTuple):
    """A row of the learning table: who decided in rows of a study, on problems of one kind.

    ``groups`` are what the study filed them under. ``rules`` are hand-written, one evaluation each;
    ``families``: what is claimed is of families, so the intervals draw them, too.
    """

    kind: str
    where: str
    objective: str
    study: str
    groups: tuple[str, ...]
    trained: str
    hand: str
    untrained: str
    rules: tuple[str, ...]
    families: bool = False


SEVEN = "seven families that no training saw"
WAITS = (zero_shot.TRAINED, zero_shot.HAND, zero_shot.UNTRAINED, zero_shot.HEURISTICS)
DECODES = (zero_shot.TRAINED, zero_shot.LIST, zero_shot.UNTRAINED, zero_shot.HEURISTICS)
ONE_DECODE = (dispatch.TRAINED, "heft", dispatch.UNTRAINED, dispatch.RULES)
LEARNING = (
    Trained(
        REAL, "latency of 20 graphs", "latency", zero_shot.STUDY.name, (zero_shot.ONE,), *DECODES
    ),
    Trained(
        REAL, "period of 20 graphs", "period", zero_shot.STUDY.name, (zero_shot.ONE,), *WAITS
    ),
    Trained(
        DRAWN, f"latency of 42 graphs of {SEVEN}, one decode", "latency",
        dispatch.NAME, ("families, 1",), *ONE_DECODE, True,
    ),
    Trained(
        DRAWN, "the same, the best of 16 decodes", "latency",
        zero_shot.STUDY.name, (zero_shot.LATENCIES,), *DECODES, True,
    ),
    Trained(
        DRAWN, f"period of 42 pipelines of {SEVEN}", "period",
        zero_shot.STUDY.name, (zero_shot.PIPELINES,), *WAITS, True,
    ),
    Trained(
        SHOPS, "117 flexible job shops, one decode", "latency",
        dispatch.NAME, tuple(f"{suite}, 1" for suite in dispatch.SHOPS), *ONE_DECODE,
    ),
)  # fmt: skip

SPEEDS = {  # what a row of the benchmark is called here
    ("one micro-batch, per operator", "600 operators, 4 devices, stages"): (
        "simulating one micro-batch of 600 operators, per operator"
    ),
    ("macro_search, moves/s", "transformer, 769 operators, 4 devices"): (
        "moves that `macro_search` tries, 769 operators"
    ),
    ("ideal_dp, seconds", "deep_chain, 2000 operators, 8 devices, 2001 ideals"): (
        "the optimal split of a chain of 2,000 operators over eight devices"
    ),
    (
        "environment steps, SequentialDevicePlacement-v0",
        "60 operators, 4 devices, latency; choosing random actions included",
    ): "steps of `envs/SequentialDevicePlacement-v0`",
    (
        "PPO steps, sequential, hidden 64",
        "60 operators, 4 devices, hidden 64, 2 layers, one thread",
    ): "steps of PPO there, updates included",
}


def learning(results: Path, short: bool = False) -> str:
    """Trained, hand-written and untrained deciders on the same problems, over the best known.

    ``short``: for the README, without these three values.
    """

    def over(who: str, row: Trained) -> str:
        best = best_known(rows_of(row.study, results))
        planner = getattr(row, who)
        mine = ratios(of_row(row, results), planner, lambda name, _: best.get(name))
        return geometric(mine).ratio()

    def against(who: str, row: Trained) -> str:
        others = row.rules if who == "rules" else (getattr(row, who),)
        family = zero_shot.family_of if row.families else None
        changes = gain(of_row(row, results), row.trained, others)
        return geometric(changes, family=family).percent()

    def mean_ms(row: Trained) -> str:
        cells = of_row(row, results)
        if not hasattr(cells[0], "used_s"):
            return DASH
        count = len({c.problem for c in cells})
        answers = [c.used_s for c in cells if c.planner == row.trained]
        rules_s = sum(c.used_s for c in cells if c.planner in row.rules)
        return f"{1e3 * np.mean(answers):.0f}; {1e3 * rules_s / count:.0f}"

    names = {"hand": "hand-written", "untrained": "untrained", "rules": "the best of all rules"}
    values = (
        Column("where", lambda r: f"{r.kind}: [{r.where}](../experiments/results/{r.study}.md)"),
        Column("trained network", partial(over, "trained")),
        Column("hand-written", partial(over, "hand")),
        Column("untrained network", partial(over, "untrained")),
    )
    return table(
        LEARNING,
        *([Column("where", lambda r: f"{r.kind}: {r.where}")] if short else values),
        *(Column(f"trained against {x}", partial(against, who)) for who, x in names.items()),
        Column("processor ms: an answer; all rules", mean_ms),
    )


def decodes(results: Path) -> str:
    """One decode of the trained networks over the best of 16 of the untrained one, drawn graphs."""
    rows = [r for r in dispatch.STUDY.read(results) if r.suite == "families"]
    best_s = {r.problem: r.value_s for r in rows if (r.who, r.samples) == (dispatch.UNTRAINED, 16)}
    ones = groups((r for r in rows if (r.who, r.samples) == (dispatch.TRAINED, 1)), "problem")
    changes = {name: [r.value_s / best_s[name] for r in mine] for name, mine in ones.items()}
    return geometric(changes, family=zero_shot.family_of).percent()


def on_real_graphs(results: Path, page: str = "experiments/results") -> str:
    """A sentence: what training on measured graphs adds on those of other architectures."""
    rows = folds.STUDY.read(results)
    found = [folds.endpoint(rows, objective) for objective in folds.OBJECTIVES]
    figures = ";\n".join(
        f"for {x['objective']}, {x['rules']} against the rules and {x['untrained']} against itself "
        f"untrained ({x['graphs']} problems)"
        for x in found
        if x["graphs"]
    )
    told = {x["objective"]: x for x in found if x["reached"] == "yes"}
    reached = f"reached for {' and '.join(told)}" if told else "not reached"
    reached += " alone" if 0 < len(told) < len(found) else ""
    if told and not any(x["by_training"] == "yes" for x in told.values()):
        reached += ", and not by training"
    return (
        "The goal, set beforehand, 1 % below the best of all rules and clear of chance after "
        "100 ms of a core,\non measured graphs of other architectures, is "
        f"{reached}. A network that passes messages is there,\n{figures}\n"
        f"([{folds.done(rows)}]({page}/learned_folds.md)).\n"
        + that_ship(results, page)
        + in_pieces(results, page)
    )


def that_ship(results: Path, page: str) -> str:
    """Sentences: what a recipe for training adds, and to the policies that ship."""
    rows = gnn.STUDY.read(results)
    released = [r for r in rows if gnn.unit_of(r).is_released]
    others = [r for r in rows if not gnn.unit_of(r).is_released]

    def by(rows: list[gnn.Row], objective: str, base: str, budget: str = "by_100_ms") -> Mean:
        mine = [r for r in rows if r.objective == objective]
        return gnn.against(mine, gnn.TRAINED, base, budget)

    def told(rows: list[gnn.Row], objective: str) -> str:
        rules, before = (by(rows, objective, x) for x in (folds.BEST_RULE, folds.UNTRAINED))
        few = folds.percent(by(rows, objective, folds.UNTRAINED, "few_s"))
        return (
            f"{few}, after 100 ms {folds.percent(before)}, and {folds.percent(rules)} against the "
            "rules"
        )

    def by_trainings(rows: list[gnn.Row], objective: str) -> str:
        mine = [r for r in rows if r.objective == objective]
        few, before = (
            gnn.against(mine, gnn.TRAINED, folds.UNTRAINED, budget, trainings=True)
            for budget in ("few_s", "by_100_ms")
        )
        return f"{folds.percent(few)}, after 100 ms {folds.percent(before)}"

    units = {gnn.unit_of(r) for r in others}
    reached = [o for o in folds.OBJECTIVES if by(others, o, folds.UNTRAINED, "few_s").high < 1]
    again = ";\n".join(f"for {o}, {told(others, o)}" for o in folds.OBJECTIVES)
    drawn = "; ".join(f"{o} {by_trainings(others, o)}" for o in folds.OBJECTIVES)
    ship = ";\n".join(f"`gnn-{o}` {told(released, o)}" for o in folds.OBJECTIVES)
    return (
        "Another recipe, GraphSAGE and PPO by what the best samples are worth, was to be ahead of "
        f"itself untrained with 33 decodes.\nThat is reached for "
        f"{' and '.join(reached) or 'no objective'}, by {len(units)} trainings in "
        f"{len({u.fold for u in units})} folds, all written down before. Against itself "
        f"untrained,\n{again}.\nAll problems of a training share its network: where trainings "
        f"are drawn first, {drawn}.\nTwo policies of it ship, of an earlier training each, judged "
        f"by one fold that it did not see:\n{ship} ([page]({page}/learned_gnn.md)).\n"
    )


def in_pieces(results: Path, page: str) -> str:
    """A sentence: what search and training add where operators are in pieces."""
    rows = split.STUDY.read(results)
    mine = folds.decides(rows)

    def by(arm: str, base: str) -> str:
        return folds.percent(folds.over(mine, arm, 1.0, base, base == folds.BEST_RULE))

    reached = "" if split.reached(rows) else "not "
    return (
        "Where operators are in pieces, after 1 s, `order_search` is "
        f"{by('order_search', folds.BEST_RULE)} against the best of all rules,\nthe network "
        f"{by(folds.MESSAGES, folds.BEST_RULE)}, against itself untrained "
        f"{by(folds.MESSAGES, folds.UNTRAINED)}: 1 % below both is {reached}reached "
        f"([page]({page}/learned_split.md)).\n"
    )


def of_row(row: Trained, results: Path) -> list[Any]:
    """The study's rows that belong to a row of the learning table."""
    return [
        c
        for c in rows_of(row.study, results)
        if (c.objective, kind_of(c)) == (row.objective, row.kind) and c.group in row.groups
    ]


def kind_of(row: Any) -> str:
    """Real, drawn or shops: of what kind the problem of a study's row is, by suite or name."""
    if getattr(row, "suite", "") in dispatch.SHOPS:
        return SHOPS
    origin_of = row.problem.partition(": ")[0]
    return REAL if origin_of in set(FAMILIES) - {"synthetic"} else DRAWN


def rows_of(study: str, results: Path) -> list[Any]:
    """Committed rows of a study of the learned planner, which need not be in the tree any more."""
    kind = dispatch.Row if study == dispatch.NAME else Cell
    return list[Any](read_csv(kind, results / f"{study}.csv"))


def answers(results: Path) -> str:
    """The best planners at equal budgets."""
    rows = baselines.STUDY.read(results)
    field = dict(list(by_planner(rows).items())[:MOST_ROWS])
    runs = groups(rows, "planner")
    return table(
        field,
        Column("planner", lambda p: f"`{p}`"),
        Column("over the best found (95 %)", lambda p: geometric(field[p]).ratio()),
        Column("best on", partial(best_on, field), 1),
        Column("median s", lambda p: float(np.median([r.used_s for r in runs[p]])), 2),
    )


def best_on(field: dict[str, dict[str, list[float]]], planner: str) -> float:
    """Problems on which it is as good as any, on average over its seeds."""
    return sum(float(np.mean(np.array(v) <= baselines.TIES)) for v in field[planner].values())


def proved(results: Path) -> tuple[int, int]:
    """On how many problems the best value that was found is proved to be optimal; of how many."""
    problems = groups(baselines.STUDY.read(results), "problem").values()
    ties = baselines.TIES
    optimal = [baselines.best_s(rows) < ties * baselines.proved_s(rows) for rows in problems]
    return sum(optimal), len(problems)


def by_planner(rows: Sequence[Cell]) -> dict[str, dict[str, list[float]]]:
    """Ratios to the best found, by planner and problem, best first; the worst for no answer."""
    ratios_of: dict[str, dict[str, list[float]]] = {}
    for problem, runs in groups(rows, "problem").items():
        values = [r.value_s for r in runs if r.value_s is not None]
        for planner, mine in groups(runs, "planner").items():
            if not planner.startswith(SINGLE):
                ratios_of.setdefault(planner, {})[problem] = [
                    (r.value_s or max(values)) / min(values) for r in mine
                ]
    return dict(sorted(ratios_of.items(), key=lambda item: geometric(item[1], 1).value))


def error(rows: Sequence[fidelity.Row], what: str) -> str:
    """Mean absolute error of what the profile alone predicts, in percent."""
    pairs = [(getattr(r, f"plain_{what}_s"), getattr(r, f"measured_{what}_s")) for r in rows]
    return f"{100 * np.mean([abs(predicted / measured - 1) for predicted, measured in pairs]):.1f}"


def speeds(results: Path) -> str:
    """Five rows of the benchmark.

    Raises:
        KeyError: the benchmark has no such row any more.
    """
    text = (results / "bench.json").read_text(encoding="utf-8")
    by_name = {(row["name"], row["note"]): row for row in json.loads(text)["rows"]}
    return table(
        [(called, by_name[key]) for key, called in SPEEDS.items()],
        Column("what", lambda r: r[0]),
        Column(
            "value",
            lambda r: f"{in_digits(r[1]['value'])} {r[1]['unit'].replace('1/s', 'a second')}",
        ),
    )


def in_digits(value: float) -> str:
    """Three of them; thousands have commas."""
    return f"{float(f'{value:.3g}'):,g}" if value < 1e5 else f"{float(f'{value:.3g}'):,.0f}"


def second_device(results: Path) -> str:
    """Pipelines over two devices beside plain PyTorch: those of ``MODELS`` that have a row."""
    rows, ways = of_models(results), ("one device", "two replicas", "best cut")
    return table(
        [rows[case] for case in MODELS if case in rows],
        Column("model", lambda r: MODELS[r["case"]]),
        *(Column(way, way, 1, 1e3, " ms") for way in ways),
        Column("plain PyTorch, both cores", "plain, 2 threads", 1, 1e3, " ms"),
        Column("gain over one device", "against one device", 2, 1, "x"),
        Column("gain over plain PyTorch", "against plain", 2, 1, "x"),
    )


# --- tables of pages that people write -----------------------------------------------------------

MODELS = {
    "resnet50": "ResNet-50",
    "bert_base": "BERT-base, 128 tokens",
    "bert_tiny_hidden128": "BERT, hidden size 128",
    "lstm": "LSTM",
    "dlrm": "DLRM",
    "inception": "Inception",
    "convnext": "ConvNeXt",
    "gpt2": "GPT-2",
}
PIPELINING = "`python -m experiments.pipelining`"
UNLIKE = "`git checkout 1c04a529`, `python -m experiments.pipelining bert_base:unlike`"
REPLICAS = "`python -m experiments.public replicas`"


def of_models(results: Path) -> dict[str, Any]:
    """The rows of ``pipelining`` by case."""
    return {row["case"]: row for row in pipelining.STUDY.read(results)}


def first_table(results: Path) -> str:
    """The README's: PyTorch as it is and compiled, and what ``optimize`` keeps."""
    ms = partial(Column, digits=2, scale=1e3, unit=" ms")
    heads = {"plain, 1 core": "plain PyTorch, 1 core", "plain, 2 core": "plain, 2 cores"}
    heads |= {w: w for w in (compiled.PLAIN_COPIES, "compiled, 1 core")}
    heads |= {"compiled, 2 core": "compiled, 2 cores", compiled.COPIES: compiled.COPIES}
    heads |= {"our run": "ours, 1 core", "kept": "ours, 2 cores"}
    return table(
        sorted(compiled.STUDY.read(results), key=lambda r: [*MODELS].index(r["workload"])),
        Column("model", lambda r: MODELS[r["workload"]]),
        *(ms(head, compiled.took(way)) for way, head in heads.items()),
        Column("what ours is", "kept"),
        Column("speed over PyTorch's best, 2 cores", compiled.RATIOS[compiled.BEST], 2, 1, "x"),
    )


def when_to_do_what(results: Path) -> str:
    """In ``docs/replicas.md``: when to replicate, to cut, and to leave one device alone."""
    measured = of_models(results)
    (study,) = (s for s in public.STUDIES if s.word == "replicas")
    analytic = groups(study.read(results), "problem")

    def took(case: str) -> str:
        ways = ("one device", "two replicas", "best cut", "plain, 2 threads")
        seconds = {way: measured.get(case, {}).get(way) for way in ways}
        return "; ".join(f"{way} {1e3 * s:.3g} ms" for way, s in seconds.items() if s)

    def loads(name: str) -> str:
        (rows,) = (rows for file, rows in analytic.items() if name in file)
        cut_s, replicas_s = (
            min(r.value_s for r in rows if (r.planner in public.TURNS) == turns and r.value_s)
            for turns in (False, True)
        )
        return f"best cut {1e3 * cut_s:.4g} ms; replicas {1e3 * replicas_s:.4g} ms"

    lines = (
        ("every device holds the model, and only throughput counts", "replicate", "resnet50"),
        ("one operator is heavier than a device's share", "replicate", "pipedream/alexnet"),
        ("a cut sends much (operators of a ResNet-50)", "replicate", "operator/resnet50_inference"),
        ("many small operators in a row", "replicate", "lstm"),
        ("a cut is balanced and sends little", "either", "bert_base"),
        ("memory is short: 0.6 of the model per device", "cut", "resnet50:0.6"),
        ("memory is short, the cut uneven (BERT, 23 GB)", "cut, and replicate what fits",
         "operator/bert_L-12_training"),
        ("one device is slow (BERT's 24 layers, a CPU beside 6 accelerators)",
         "give it the few operators that it is good at", "layer/bert24_inference"),
        ("devices are unlike per operator (BERT-base; one computes as in 2008)", "cut, by a little",
         "bert_base:unlike"),
        ("latency counts (Inception-v3)", "cut: replicas end more often, not sooner",
         "inception:latency"),
        ("an item takes a fraction of a millisecond", "one device, or plain PyTorch", "dlrm"),
    )  # fmt: skip
    figures = {x[2]: loads(x[2]) if "/" in x[2] else took(x[2]) for x in lines}

    def command(case: str) -> str:
        return REPLICAS if "/" in case else UNLIKE if "unlike" in case else PIPELINING

    return table(
        lines,
        Column("when", lambda x: x[0]),
        Column("do", lambda x: x[1]),
        Column("figures", lambda x: figures[x[2]]),
        Column("command", lambda x: command(x[2])),
    )


BEGIN, END = "<!-- figures: experiments.results -->\n", "<!-- end of figures -->"
TABLES = {
    "../README.md": (
        first_table,
        on_real_graphs,
        partial(learning, short=True),
        gpu_results.headlines,
    ),
    "replicas.md": (when_to_do_what,),
}


def with_figures(page: str, figures: Sequence[str]) -> str:
    """The page with these tables between the marks, one after another."""
    places = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    assert len(places.findall(page)) == len(figures)
    texts = iter(figures)
    return places.sub(lambda _: f"{BEGIN}{next(texts)}{END}", page)


def reproduction(page: str, results: Path) -> str:
    """In ``docs/reproduce.md``: files, command, day and machine of each study.

    What a study answers, its minutes and whether it needs public data are kept as the page has
    them.

    Raises:
        KeyError: a file of the results has no row, or a row no file.
    """
    files: dict[str, list[str]] = {}
    kinds = (".md", ".json", ".csv", ".png")  # what is read first comes first
    for path in sorted(results.iterdir(), key=lambda x: (kinds.index(x.suffix), x.name)):
        link = f"[{path.suffix[1:]}](../experiments/results/{path.name})"
        files.setdefault(path.stem.removesuffix("_curve"), []).append(link)
    head = "| result | what it answers | `python -m` | minutes | made |\n|---|---|---|---:|---|\n"
    lines, machines = "", list[str]()
    for row in page.partition(head)[2].partition("\n\n")[0].splitlines():
        links, answers, command, minutes, _ = (x.strip() for x in row.strip("|").split("|"))
        name = links.partition("results/")[2].partition(".")[0]
        links, needs_data = ", ".join(files.pop(name)), " (1)" * command.endswith(" (1)")
        command, commit, facts = made_by(name, results)
        machine = f"{short(facts['cpu'])}, {facts['cores']} cores"
        if machine not in machines:
            machines.append(machine)
        made = f"{facts['when'][:10]} {'ABCDEFGH'[machines.index(machine)]}"
        cells = (links, answers, f"`{command}`{commit}{needs_data}", minutes, made)
        lines += f"| {' | '.join(cells)} |\n"
    if files:
        raise KeyError(f"{sorted(files)}: add a row to docs/reproduce.md, with what it answers")
    where = [f"Machine {letter}: {m}.\n" for letter, m in zip("ABCDEFGH", machines, strict=False)]
    return f"{head}{lines}\n{''.join(where)}"


def made_by(name: str, results: Path) -> tuple[str, str, dict[str, str]]:
    """The words after ``python -m`` that made a result, and the facts it noted: when, cpu, ...

    Between them at which commit, if the study has left the tree.
    """
    page = results / f"{name}.md"
    if page.is_file():
        text = page.read_text("utf-8")
        command = re.search(r"^`python -m ([^`]+)`$", text, re.MULTILINE)
        assert command is not None, f"{page} does not say which command made it"
        commit = re.search(
            r"^The study has left the tree.*`git checkout (\w+)`", text, re.MULTILINE
        )
        return command[1], f" at `{commit[1]}`" if commit else "", origin(text)[1]
    facts = json.loads((results / f"{name}.json").read_text("utf-8"))["provenance"]
    return f"experiments.{name}", "", {k: str(v) for k, v in facts.items()}


def short(cpu: str) -> str:
    return re.sub(r"\((R|TM)\)| Processor| CPU", "", cpu).replace("  ", " ")


def plot_fidelity(rows: Sequence[fidelity.Row], path: Path) -> None:
    """Predicted over measured periods, a point per placement, a colour per model."""
    figure = gantt.figure_class()(figsize=(7, 4.6), dpi=100)
    axis = figure.subplots()
    measured = [1e3 * r.measured_period_s for r in rows]
    ends = (min(measured) * 0.8, max(measured) * 1.25)
    axis.plot(ends, ends, color=gantt.FAINT, lw=0.8)
    for k, (model, mine) in enumerate(groups(rows, "workload").items()):
        axis.plot(
            [1e3 * r.measured_period_s for r in mine],
            [1e3 * r.predicted_period_s for r in mine],
            "o" if k < len(gantt.COLOURS) else "^",
            ms=3.5,
            alpha=0.7,
            color=gantt.COLOURS[k % len(gantt.COLOURS)],
            label=model,
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("measured ms per micro-batch", fontsize=9, color=gantt.INK)
    axis.set_ylabel("predicted ms per micro-batch", fontsize=9, color=gantt.INK)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    gantt.plain_axis(axis)
    axis.tick_params(axis="y", colors=gantt.FAINT, labelsize=9)
    figure.tight_layout()
    gantt.save_figure(figure, path)


# --- the pages -----------------------------------------------------------------------------------


def sources(results: Path) -> str:
    """First digits of the SHA-256 over all files of the results: the picture follows from them."""
    state = hashlib.sha256()
    for path in sorted(results.iterdir()):
        if path.suffix in (".csv", ".json", ".md"):
            state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()[:12]


def page(results: Path = RESULTS) -> str:
    """``docs/results.md``."""
    placements = fidelity.STUDY.read(results)
    optimal, problems = proved(results)
    cuts = {k: 100 * row["error of cut"] for k, row in of_models(results).items()}
    dlrm = cuts.pop("dlrm")
    parts: Mapping[str, Any] = {
        "cuts": f"{min(cuts.values()):.1f} to +{max(cuts.values()):.1f}",
        "dlrm": f"{dlrm:.1f}",
        "digest": sources(results),
        "learning": learning(results),
        "decodes": decodes(results),
        "folds": on_real_graphs(results, "../experiments/results"),
        "answers": answers(results),
        "optimal": optimal,
        "problems": problems,
        "placements": len(placements),
        "models": len(groups(placements, "workload")),
        "latency": error(placements, "latency"),
        "period": error(placements, "period"),
        "speeds": speeds(results),
        "second": second_device(results),
        "gpu": gpu_results.headlines(results, MOST_ROWS),
    }
    return filled("results", parts)


def optima_page(results: Path = RESULTS) -> str:
    """``docs/bench.md``."""
    rows = leaderboard.STUDY.read(results)
    return filled("optima", {"suites": leaderboard.suites(), "tables": leaderboard.tables(rows)})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args(argv)
    pages = {
        options.docs / "results.md": page(options.results),
        options.docs / "bench.md": optima_page(options.results),
    }
    for name, figures in TABLES.items():
        if (path := options.docs / name).is_file():
            texts = [figure(options.results) for figure in figures]
            pages[path] = with_figures(path.read_text("utf-8"), texts)
    if (path := options.docs / "reproduce.md").is_file():
        text = path.read_text("utf-8")
        pages[path] = with_figures(text, [reproduction(text, options.results)])
    if options.check:
        stale = [p for p, text in pages.items() if not p.is_file() or p.read_text("utf-8") != text]
        for path in stale:
            say(f"{path} is not up to date; run: python -m experiments.results")
        return int(bool(stale))
    for path, text in pages.items():
        write_atomic(path, text)
    plot_fidelity(fidelity.STUDY.read(options.results), options.docs / "img/results_fidelity.png")
    say(f"written: {', '.join(map(str, pages))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
