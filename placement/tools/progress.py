"""What is said on standard error while something takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TextIO


class Signs(NamedTuple):
    """When something is said that nobody asked for."""

    first_s: float = 3.0  # of work, after which a log has a first line
    every_s: float = 15.0  # between two lines of it
    compiling_s: float = 1.0  # of compiling, after which it is said


SIGNS = Signs()
_UNPRINTABLE = dict.fromkeys(
    [*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)],
    "?",
)

Progress = Callable[[str, float | None], None]  # (what is being done, share done or None)


def say(text: str, stream: TextIO | None = None) -> None:
    """One message on standard error."""
    print(f"placement: {printable(text)}", file=stream or sys.stderr)


def printable(text: str) -> str:
    """``?`` for what would move a terminal's cursor, colour it or turn its text around.

    Names come from files of anybody.
    """
    return text.translate(_UNPRINTABLE)


@contextmanager
def says_when_compiling(quiet: bool = False) -> Iterator[None]:
    """A message, once, where compiling kernels takes more than ``SIGNS.compiling_s`` inside."""
    from numba.core import event

    class Message(event.Listener):  # type: ignore[misc]
        """Kernels are compiled inside each other: of nested ones the outermost counts."""

        depth, began, spent_s, is_said = 0, 0.0, 0.0, quiet

        def on_start(self, _: object) -> None:
            if not self.depth:
                self.began = time.perf_counter()
            self.depth += 1
            if not self.is_said and self.now_s() > SIGNS.compiling_s:
                self.is_said = True
                say("compiling kernels, once after installation: up to a minute")

        def on_end(self, _: object) -> None:
            self.depth -= 1
            if not self.depth:
                self.spent_s = self.now_s()

        def now_s(self) -> float:
            return self.spent_s + time.perf_counter() - self.began

    with event.install_listener("numba:compile", Message()):
        yield


@contextmanager
def progress(quiet: bool = False) -> Iterator[Progress]:
    """What reports progress: a bar on a terminal; elsewhere (in a log) a line after
    ``SIGNS.first_s``, then one every ``SIGNS.every_s``."""
    if quiet:
        yield lambda what, share: None
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress as Bar
        from rich.progress import TextColumn

        # The first column is text, whatever brackets a name has. Seldom: the thread that draws
        # takes time from the devices that are measured. Answers for a pipe are not drawn above.
        bar = Bar(
            TextColumn("{task.description}", markup=False),
            *Bar.get_default_columns()[1:],
            console=Console(stderr=True, markup=False, emoji=False),
            transient=True,
            refresh_per_second=3,
            redirect_stdout=sys.stdout.isatty(),
        )
        with bar:
            task = bar.add_task("", total=None)

            def show(what: str, share: float | None) -> None:
                total, done = share and 1.0, share or 0.0
                bar.update(task, description=printable(what), total=total, completed=done)

            yield show
        return
    began, ended = time.monotonic(), threading.Event()
    stream = sys.stderr  # what captures a model keeps others' words off it meanwhile
    doing = "working"

    def note(what: str, share: float | None) -> None:
        nonlocal doing
        doing = what + ("" if share is None else f" ({share:.0%})")

    def tell() -> None:  # of its own: who works long may report nothing for long
        wait_s = SIGNS.first_s
        while not ended.wait(wait_s):
            wait_s = SIGNS.every_s
            took_s = round(time.monotonic() - began)
            took = f"{took_s} s" if took_s < 120 else f"{took_s // 60} min"
            say(f"{doing}, after {took}", stream)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield note
    finally:
        ended.set()
        teller.join()
