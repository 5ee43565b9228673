"""Entry points of the commands: Ctrl-C ends them quietly from their first moment on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from importlib import import_module


def _begin(module: str) -> Callable[[], int]:
    """``main`` of a module that is not imported yet."""

    def main() -> int:
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:
            # Nothing has begun. Some libraries would make another error of an exception.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        command = import_module(module)
        signal.signal(signal.SIGINT, before)
        try:
            exit_code: int = command.main()
            return exit_code
        except KeyboardInterrupt:  # before or behind what the command does
            sys.stderr.write("placement: interrupted\n")
            return 130

    return main


placement = _begin("placement.__main__")
compare = _begin("agents.cli.compare")
train = _begin("agents.cli.train")
sweep_report = _begin("agents.cli.sweep_report")
