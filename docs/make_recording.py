"""Record the first minute: run each command, and draw what it prints, with the seconds it took.

    python docs/make_recording.py

Commands run in an empty folder with an empty store of profiles, one after another, as a new user
types them. The picture is ``docs/first_minute.svg``; its figures are of the machine and the moment.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

SCREEN = Path(__file__).with_name("first_minute.svg")
COLUMNS = 100
COMMANDS = (
    "placement optimize bert_base --seconds 5 --out plan.json",
    "placement run plan.json --against-single-device --batches 16",
    "placement export plan.json --to torch_pipelining --out pipeline.py --nearest",
)


def record(screen: Console, folder: str) -> None:
    """Raises: CalledProcessError, a command failed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {
        "PATH": path,
        "PLACEMENT_HOME": f"{folder}/home",
        "PYTHONUNBUFFERED": "1",
    }
    for command in COMMANDS:
        screen.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        began = time.monotonic()
        ended = subprocess.run(
            command.split(),
            cwd=folder,
            env=environment,
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        took = f"{time.monotonic() - began:.0f} s"
        for line in ended.stdout.rstrip().splitlines():
            screen.print(Text(line.rstrip()))
        screen.print(Text(f"[{took}]\n", "dim"))


def main() -> None:
    screen = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        record(screen, folder)
    drawn = screen.export_svg(title="the first minutes", unique_id="first-minute")
    # Whatever monospaced font there is: nothing is fetched to show it.
    SCREEN.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))
    print(f"written: {SCREEN}")


if __name__ == "__main__":
    main()
