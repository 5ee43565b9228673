"""A few hundred mutated files, the same every time; ``make fuzz`` tries thousands."""

from collections.abc import Mapping

import pytest

from placement.importers import FormatError
from tests import fuzz

COUNT = 25  # of each reader


@pytest.fixture(scope="module")
def targets() -> Mapping[str, fuzz.Target]:
    return fuzz.made_targets()


@pytest.mark.parametrize("name", fuzz.NAMES)
def test_a_mutated_file_is_refused_in_a_line_or_right(name, targets):
    results = fuzz.run(targets, name, range(COUNT))
    assert [case for case in results if case[1] == "defect"] == []
    assert len(results) == COUNT
    if name != "report":  # which shows what it can, and names the rest
        assert any(kind == "refused" for _, kind, _ in results)


def test_a_hang_and_an_eruption_are_told_from_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "MAX_SECONDS", 0.2)

    def hangs(_: object) -> None:
        while True:
            pass

    def fills(_: object) -> None:
        bytearray(2 * fuzz.MAX_BYTES)

    def divides(_: object) -> None:
        raise ZeroDivisionError

    def refuses(_: object) -> None:
        raise FormatError("no")

    for use, expected in (
        (hangs, ("defect", "0.2 s of processor time")),
        (fills, ("defect", "more memory than a GiB")),
        (refuses, ("refused", "no")),
    ):
        target = {"x": fuzz.Target({"x.json": b"{}"}, use)}
        assert [case[1:] for case in fuzz.run(target, "x", range(2))] == [expected] * 2
    crashed = fuzz.run({"x": fuzz.Target({"x.json": b"{}"}, divides)}, "x", [0])
    assert crashed[0][1] == "defect" and "ZeroDivisionError" in crashed[0][2]
