"""The walk of a command through the house: which rooms it asks, and which files that passes.

    python -m experiments.walk optimize      # placement.optimize(tiny_mlp, inputs)
    python -m experiments.walk plan          # placement plan tiny_mlp

A row is a room that the entry (``optimizing.py``, or ``cli/``) asks, in the order in which it first
does, how often it comes there, and how many files of which rooms it passes below. What an import
runs does not count, nor do ``tools``.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import placement
from placement.__main__ import main as command
from placement.workloads import load

HOME = Path(placement.__file__).parent


@cache
def file_of(path: str) -> str | None:
    """A file of ``placement``, below its folder; None of others."""
    return str(Path(path).relative_to(HOME)) if HOME in Path(path).parents else None


@cache
def room_of(file: str) -> str:
    """A folder, or a file at the root."""
    return Path(file).parts[0]


def walked(entry: str, run: Callable[[], Any]) -> dict[str, tuple[int, set[str]]]:
    """By room that the room ``entry`` asks: how many stays there, and the files that they pass."""
    rooms: dict[str, tuple[int, set[str]]] = {}
    last = ""  # the room that was asked last

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal last
        file = file_of(frame.f_code.co_filename)
        if event != "call" or file is None or frame.f_code.co_name == "<module>":
            return
        above, room = frame.f_back, room_of(file)
        while above is not None and file_of(above.f_code.co_filename) is None:
            above = above.f_back
        caller = above and room_of(file_of(above.f_code.co_filename) or "")
        if above is None or above.f_code.co_name == "<module>" or room in (entry, "tools"):
            return
        if caller == entry:
            stays, files = rooms.get(room, (0, set()))
            rooms[room] = stays + (room != last), files
            last = room
        if last:
            rooms[last][1].add(file)

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return rooms


def main(argv: list[str] | None = None) -> int:
    """Print the table of one walk."""
    (what,) = argv or sys.argv[1:] or ["optimize"]
    with tempfile.TemporaryDirectory() as folder:
        if what == "plan":
            words = ["plan", "tiny_mlp", "--out", f"{folder}/plan.json"]
            rooms = walked("cli", lambda: command(words))
        else:
            module, inputs = load("tiny_mlp")
            run = lambda: placement.optimize(module, inputs, seconds=1.0, quiet=True)  # noqa: E731
            rooms = walked("optimizing.py", run)
    print("| room | stays | files that it passes |\n|---|---:|---|")
    for room, (stays, files) in rooms.items():
        passed = Counter(map(room_of, sorted(files)))
        print(f"| `{room}` | {stays} | {', '.join(f'{r} {n}' for r, n in passed.items())} |")
    every = set().union(*(files for _, files in rooms.values()))
    stays = sum(n for n, _ in rooms.values())
    print(f"\n{stays} stays in {len(rooms)} rooms; {len(every)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
