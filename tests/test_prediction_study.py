"""The study of predicted times: what it leaves out, and the arithmetic of its tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_latency import sample

from experiments._study import StudyError
from experiments.prediction import (
    Answer,
    Case,
    answers,
    entries,
    operators,
    placed,
    row_of,
    saved,
    strategies,
    whole_models,
)
from placement import latency


def case(seed: int, family: str) -> Case:
    return Case(f"model {seed}", family, "mlp", sample(seed), 0.02)


def answer(seed: int, factor: float) -> Answer:
    found = case(seed, "f")
    seconds = factor * found.sample.compute_s
    return Answer(found, "polynomial", seconds, 0.1 * seconds)


def test_the_first_models_are_of_every_kind() -> None:
    todo = entries()
    kinds = {entry.kind for entry in todo}
    assert {entry.kind for entry in todo[: len(kinds)]} == kinds
    assert len({entry.name for entry in todo}) == len(todo)


def test_a_family_is_predicted_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [case(seed, "abc"[seed % 3]) for seed in range(6)]
    family_of = {id(c.sample): c.family for c in known}
    seen: list[set[str]] = []

    class Spy:
        def fit(self, samples):  # type: ignore[no-untyped-def]
            seen.append({family_of[id(s)] for s in samples})
            return self

        def predict(self, graph, device):  # type: ignore[no-untyped-def]
            return np.ones(graph.num_ops), np.ones(graph.num_ops)

    monkeypatch.setattr(latency, "load", lambda name, **_: Spy())
    found = answers(known, ["spy"])
    assert sorted(a.case.name for a in found) == sorted(c.name for c in known)
    assert sorted(map(sorted, seen)) == [["a", "b"], ["a", "c"], ["b", "c"]]


def test_one_family_cannot_be_left_out() -> None:
    with pytest.raises(StudyError, match="models of 1 family"):
        answers([case(0, "a"), case(1, "a")], ["roofline"])


def test_errors_of_whole_models_and_operators() -> None:
    found = [answer(0, 1.1), answer(1, 0.7)]
    rows = [row_of(a) for a in found]
    assert [r.error for r in rows] == pytest.approx([0.1, -0.3])
    # median and mean of 10 % and 30 %; within 10 %: one of two, but for rounding
    assert "| polynomial, 1 thread | 2 | 20.0 | 20.0 |" in whole_models(rows)
    assert "at most 10" in whole_models(rows)
    assert "| linear |" in operators(found) and "| 20 |" in operators(found)


def test_measuring_some_corrects_the_others() -> None:
    # All are 30 % too low: knowing three products and three others corrects everything.
    lines = saved([answer(seed, 0.7) for seed in range(5)]).splitlines()
    assert lines[2].split("|")[3].strip() == "30.0"
    assert float(lines[-1].split("|")[3]) < 1.0
    nothing = saved([replace(answer(0, 0.7), method="trees")]).splitlines()
    assert len(nothing) == 2


def test_regret_and_rank_correlation() -> None:
    names = [
        "search, measured",
        "search, roofline",
        "search, polynomial",
        "search, trees",
        "static",
    ]
    measured = dict(zip(names, ([2, 2.0], [3, 3.0], [2, 2.2], [2, 1.9], [4, 4.0]), strict=True))
    backwards = {name: [1 / x, 1 / y] for name, (x, y) in measured.items()}
    plan = {
        "model": "m",
        "measured": measured,
        "simulated": {"measured": measured, "roofline": backwards, "polynomial": measured,
                      "trees": measured},
        "ranks": {"measured": 1.0, "roofline": 0.5, "polynomial": 0.9, "trees": 0.8},
        "seconds": {"static": 0.5, "measuring and searching": 60.0},
    }  # fmt: skip
    rows = {line.split("|")[1].strip(): line for line in placed([plan]).splitlines()[2:]}
    assert "| 0.0 | 0.0 | 1.000 | 1.000 | 0.0 | 0.0 |" in rows["measured"]
    assert "| 0.500 | -1.000 | 50.0 | 50.0 |" in rows["roofline"]
    assert "| 0.900 | 1.000 | 10.0 | 10.0 |" in rows["polynomial"]
    assert "| -5.0 | -5.0 |" in rows["trees"]
    assert "| m | 0.500 | 60.0 | 120x | 100.0 |" in strategies([plan])
