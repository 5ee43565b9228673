"""``placement completion``: what a shell types for you when you press the Tab key (argcomplete).

The script of a shell asks this command, so that new planners and models are known at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable

from placement import cli
from placement.objective import Objective

EXAMPLE = """examples:
  eval "$(placement completion bash)"                         in ~/.bashrc
  eval "$(placement completion zsh)"                          in ~/.zshrc, after compinit
  placement completion fish | source                          in ~/.config/fish/config.fish

The Hydra commands bring their own: eval "$(placement-compare -sc install=bash)"
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "fish", "zsh"])


def run(args: argparse.Namespace) -> int:
    import argcomplete

    script = argcomplete.shellcode(["placement"], shell=args.shell)
    if args.json:
        cli.print_json({"shell": args.shell, "script": script})
    else:
        print(script, end="")
    return cli.OK


def answer(parser: argparse.ArgumentParser) -> None:
    """Tell a shell that asks (``_ARGCOMPLETE``) what the last word can become, and end."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(with_names(parser))


def with_names(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser, whose actions know which names they take; of the others, files are completed."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                with_names(verb)
        elif action.dest in _NAMES:
            action.completer = _NAMES[action.dest]  # type: ignore[attr-defined]
    return parser


def _names(package: str) -> Callable[..., list[str]]:
    """A completer: the names of what a package of ``placement`` has."""
    return lambda **_: list(importlib.import_module(f"placement.{package}").names())


_NAMES: dict[str, Callable[..., list[str]]] = {
    "workload": _names("workloads"),
    "model": _names("workloads"),
    "planner": _names("planners"),
    "scheduler": _names("schedulers"),
    "to": _names("exporters"),
    "objective": lambda **_: list(Objective),
    "mode": lambda **_: ["inference", "training"],
    "optimizer": lambda **_: ["Adam", "AdamW", "RMSprop", "SGD"],
}
