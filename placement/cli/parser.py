"""How the ``placement`` command says that it was not typed right."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, NoReturn

from placement import cli
from placement.tools.named import meant


class Help(argparse.RawDescriptionHelpFormatter):
    """Paragraphs are as wide as the terminal; those with indented lines, as examples, stay."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrapper = textwrap.TextWrapper(min(width, cli.LIMITS.prose), indent, indent)
        wrapper.break_long_words = wrapper.break_on_hyphens = False

        def filled(paragraph: str) -> str:
            if re.search(r"^ ", paragraph, re.MULTILINE):
                return textwrap.indent(paragraph, indent)
            return wrapper.fill(paragraph)

        return "\n\n".join(map(filled, text.strip("\n").split("\n\n")))


class Parser(argparse.ArgumentParser):
    """One line says what is wrong, what may have been meant, and where to look.

    An option that there is not is told before one that is missing: it may be the same one.
    """

    _words: tuple[str, ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = tuple(sys.argv[1:] if args is None else args)
        parsed, rest = super().parse_known_args(args, namespace)
        if rest and any(self._unknown()):
            self.error("")
        if getattr(parsed, "verb", "none is meant") is None:
            self.print_help(sys.stderr)
            sys.exit(cli.BAD_INPUT)
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        for name in self._unknown():
            message = f"no option {name!r}{meant(name, self._option_string_actions)}"
            break
        end = "" if message.endswith("?") else ";"
        cli.say(f"error: {message}{end} see: {self.prog} --help")
        sys.exit(cli.BAD_INPUT)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what, choices = action.dest, [str(x) for x in action.choices]
            near = meant(str(value), choices) or ";"
            self.error(f"no {what} {value!r}{near} {what}s are {', '.join(choices)}")

    def _verbs(self) -> Iterator[str]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices

    def _unknown(self) -> Iterator[str]:
        """Options that were typed and that there are not; those of a verb are its own parser's."""
        own = takewhile(lambda w: w.startswith("-") or not any(self._verbs()), self._words)
        for word in takewhile(lambda w: w != "--", own):
            name = word.partition("=")[0]
            is_prefix = any(option.startswith(name) for option in self._option_string_actions)
            if re.match(r"--?[A-Za-z]", name) and not is_prefix:
                yield name
