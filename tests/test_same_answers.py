"""What planners, schedulers, the simulator and files answer is what was recorded."""

import json
from pathlib import Path

from experiments.same_answers import PARTS, differences, record

RECORDED = Path(__file__).with_name("same_answers.json")


def test_answers_are_those_recorded() -> None:
    """Nothing here depends on networks, solvers, or the type of processor.

    A change that is meant: python -m experiments.same_answers record
    --rows-of tests/same_answers.json --out tests/same_answers.json
    """
    old = json.loads(RECORDED.read_text(encoding="utf-8"))
    parts = [part for part in PARTS if any(key.startswith(f"{part} |") for key in old)]
    new = {key: row for rows in record(parts, set(old)) for key, row in rows.items()}
    assert differences(old, new) == []


def test_what_differs_is_named() -> None:
    old = {"a | p | m": {"value": "1.0"}, "b | p | m": {}, "c | p | m": {"error": "no"}}
    new = {"a | p | m": {"value": "1.0000000000000002"}, "c | p | m": old["c | p | m"]}
    new["d | p | m"] = {}
    assert differences(old, new) == [
        "a | p | m: value was 1.0, is 1.0000000000000002",
        "missing: b | p | m",
        "new: d | p | m",
    ]


def test_a_plan_file_that_cannot_be_read_is_named() -> None:
    row = {"plans | p | heft": {"plan": "0", "text": '{"schema_version": 0}'}}
    (line,) = differences(row, row)
    assert "is not read and written as it was" in line
    assert "PlanError" in line
