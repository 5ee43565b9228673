"""``placement completion``: what a shell types for you when you press the Tab key.

The script of a shell asks this command, so that new planners and options are known at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise

from placement import cli

EXAMPLE = """examples:
  eval "$(placement completion bash)"                         in ~/.bashrc
  eval "$(placement completion zsh)"                          in ~/.zshrc, after compinit
  placement completion fish | source                          in ~/.config/fish/config.fish

The Hydra commands bring their own: eval "$(placement-compare -sc install=bash)"
"""
_SCRIPTS = {
    "bash": r"""_placement() {
  local IFS=$'\n'
  COMPREPLY=($("$1" completion bash --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
  [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace
}
complete -o default -F _placement placement
""",
    "zsh": r"""#compdef placement
_placement() {
  local -a found
  found=("${(@f)$($words[1] completion zsh --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ -z $found ]]; then
    _files
  elif [[ $found[1] == *=* ]]; then
    compadd -S '' -- "${(@)found%%:*}"
  else
    _describe placement found
  fi
}
compdef _placement placement
""",
    "fish": r"""function __placement_words
  set -l typed (commandline -opc) (commandline -ct | string collect --allow-empty)
  set -l found ($typed[1] completion fish --words $typed[2..-1] 2>/dev/null)
  if set -q found[1]
    printf '%s\n' $found
  else
    __fish_complete_path (commandline -ct)
  end
end
complete -c placement -f -a '(__placement_words)'
""",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(_SCRIPTS))
    # What the scripts call: everything that was typed after the command, the last word unfinished.
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.words is None:
        if args.json:
            cli.print_json({"shell": args.shell, "script": _SCRIPTS[args.shell]})
        else:
            print(_SCRIPTS[args.shell], end="")
        return cli.OK
    for word, meaning in candidates(args.parser, args.words or [""]):
        if args.shell == "bash" or not meaning:
            print(word)
        else:
            print(f"{word}{':' if args.shell == 'zsh' else chr(9)}{meaning}")
    return cli.OK


def candidates(parser: argparse.ArgumentParser, words: list[str]) -> list[tuple[str, str]]:
    """``(word, meaning)`` that the last of ``words`` can become; none where files are meant.

    Args:
        parser: of the whole command.
        words: all words after the command's name; the last is being typed, and may be empty.
    """
    *before, typed = words
    choices = _options(parser) if typed.startswith("-") else _verbs(parser)
    if before:
        verbs = dict(_subparsers(parser))
        if before[0] not in verbs:
            return []
        choices = _of_verb(verbs[before[0]], before[1:], typed)
    return [(word, meaning) for word, meaning in choices if word.startswith(typed)]


def _of_verb(
    parser: argparse.ArgumentParser, before: list[str], typed: str
) -> Iterator[tuple[str, str]]:
    """What may follow the words after a verb."""
    options = {name: action for action in parser._actions for name in action.option_strings}
    if before and before[-1] in options and options[before[-1]].nargs != 0:
        return _values(options[before[-1]])
    if typed.startswith("-"):
        return _options(parser)
    positional = [action for action in parser._actions if not action.option_strings]
    takes_value = {name for name, action in options.items() if action.nargs != 0}
    arguments = [
        word
        for i, word in enumerate(before)
        if not word.startswith("-") and (i == 0 or before[i - 1] not in takes_value)
    ]
    if not positional:
        return iter(())
    if len(arguments) >= len(positional) or positional[len(arguments)].dest == "options":
        return _planner_options(before)
    return _values(positional[len(arguments)])


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for name, verb in _subparsers(parser):
        yield name, verb.description or ""


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            for name in action.option_strings:
                # In the help of argparse, %(default)s and the like are for its formatter.
                yield name, "" if "%" in (action.help or "") else action.help or ""


def _values(action: argparse.Action) -> Iterator[tuple[str, str]]:
    """What an option or a positional argument can be; nothing: a file, or a number."""
    for name in action.choices or _names(action.dest):
        yield str(name), ""


def _names(dest: str) -> list[str]:
    from placement import exporters, planners, schedulers, workloads
    from placement.objective import Objective

    names_of: dict[str, Callable[[], list[str]]] = {
        "workload": lambda: list(workloads.names()),
        "model": lambda: list(workloads.names()),
        "planner": planners.names,
        "scheduler": schedulers.names,
        "to": exporters.names,
        "objective": lambda: list(Objective),
        "mode": lambda: ["inference", "training"],
        "optimizer": lambda: ["Adam", "AdamW", "RMSprop", "SGD"],
    }
    return names_of[dest]() if dest in names_of else []


def _planner_options(before: list[str]) -> Iterator[tuple[str, str]]:
    """``option=`` of the planner that was named."""
    from placement import planners

    for flag, name in pairwise(before):
        if flag == "--planner" and name in planners.names():
            kind = planners.find(name)
            for field in fields(kind) if is_dataclass(kind) else ():
                yield f"{field.name}=", str(field.type)
