"""The three commands as they are installed: Ctrl-C ends them with a line while they are imported.

That takes a second; what they do then with a Ctrl-C is theirs.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module


def _run(module: str) -> int:
    try:
        code: int = import_module(module).main()
    except KeyboardInterrupt:
        print("placement: interrupted", file=sys.stderr)
        return 130
    return code


compare = partial(_run, "agents.compare")
train = partial(_run, "agents.train")
sweep_report = partial(_run, "agents.sweep_report")
