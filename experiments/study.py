"""The harness of the studies: what a study is, and all that studies share.

A study is a function that yields rows, and a description of the page that shows them:

    STUDY = Study(
        name="baselines",  # of results/NAME.md and runs/NAME
        rows=rows,  # (options) -> rows, one after another
        options={"seconds": Option(2.0, "budget of every planner")},
        columns=(Column("planner", "planner"), Column("wall clock", "seconds", 1, unit=" s")),
    )
    if __name__ == "__main__":
        raise SystemExit(run(STUDY))

The rest is done here:

* **Command line**: a flag per option, whose type is that of its default (of a tuple: any number of
  words; of a list: given again and again), and ``--data``, ``--out``, ``--work`` and ``--fresh``
  for all. Studies that share a module are told apart by the first word. A user's mistake is one
  line and exit code 2, Ctrl-C is 130.
* **Resume**: ``options.finished`` keeps rows, a JSON file each, under what decides them. A row that
  is there is not made again, so the same command continues where it was interrupted, and any
  number of processes may work side by side.
* **Results**: rows that are dataclasses become ``NAME.csv``, dictionaries ``NAME.json``; a study
  may draw ``NAME.png`` and write further files. The page ``NAME.md`` is the study's section of
  ``experiments/pages.md``, its table, options and other ``parts`` filled in, with the command and
  the facts: when, where, with which versions and budgets.
  Progress goes to standard error (``say``), the text to standard output.
* **Verdict**: ``wrong`` names what contradicts something proved; then the exit code is 1.

Columns, figures and statistics are in ``experiments.tables``; planners on problems, with seeds and
equal budgets, in ``experiments.grid``; runs under a limit of time and memory, and runs that take
turns, in ``experiments.runs``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from experiments.tables import Column, read_csv, table, to_csv
from placement import cli
from placement.tools.files import write_atomic
from placement.tools.ownership import version

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
RESULTS = Path(__file__).parent / "results"
PAGES = Path(__file__).parent / "pages.md"
ONLY_BOUNDS = "prove bounds of the rows that are there again, and run nothing"
R = TypeVar("R")
Options = argparse.Namespace
Rows = Sequence[Any]


class StudyError(ValueError):
    """A study cannot run as asked for, or a planner's run came to nothing; see the message."""


@dataclass(frozen=True)
class Option:
    """A flag, or with ``word`` what stands without one: its default and its help.

    ``kind`` reads a word; without it the type of the default does (of a tuple, of its first value).
    """

    default: Any
    help: str | None = None
    kind: Callable[[str], Any] | None = None
    choices: Sequence[str] | None = None
    word: bool = False
    metavar: str | None = None

    def add(self, parser: argparse.ArgumentParser, name: str) -> None:
        flag = name if self.word else f"--{name.replace('_', '-')}"
        more: dict[str, Any] = {"default": self.default, "help": self.help}
        if isinstance(self.default, bool):
            more["action"] = "store_true"
        elif isinstance(self.default, list):  # again and again
            more |= {"action": "append", "metavar": self.metavar}
        else:
            example = self.default
            if isinstance(self.default, tuple):
                example = next(iter(self.default), "")
                more["nargs"] = "*" if self.word or not example else "+"
            kind = self.kind or (str if example is None else type(example))
            more |= {"type": kind, "choices": self.choices, "metavar": self.metavar}
        parser.add_argument(flag, **more)


class Again(NamedTuple):
    """``--FLAG``: ``rows(rows of the results, options that made them)`` replaces these rows."""

    flag: str
    help: str
    rows: Callable[[Rows, Options], Rows]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study (see the top of this file).

    Attributes:
        name: of its results.
        rows: makes or takes up the rows; None where they are only a part of them.
        columns: of its page's ``{table}``, or
        parts: all that its page names besides the options, from the rows and the options.
        options: flags, by name: an ``Option``, or a default alone.
        module: that runs it, if that is not called as the study.
        word: that chooses it among the studies of its module.
        row: class of its rows, where the file of results is read again.
        facts: what the provenance says besides.
        files: further results, content by name.
        plot: draws ``NAME.png``.
        wrong: what must not be.
        again: what makes a part of the rows again, without the other runs; the page tells when.
    """

    name: str
    rows: Callable[[Options], Iterable[Any] | None]
    columns: Sequence[Column] = ()
    parts: Callable[[Rows, Options], Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    word: str = ""
    row: type | None = None
    facts: Callable[[Options], Mapping[str, Any]] = lambda options: {}
    files: Callable[[Rows, Options], Mapping[str, str]] = lambda rows, options: {}
    plot: Callable[[Rows, Path, Options], Any] | None = None
    wrong: Callable[[Rows, Options], Any] = lambda rows, options: ()
    again: Again | None = None

    @property
    def program(self) -> str:
        return self.module or f"experiments.{self.name}"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        for name, option in self.options.items():
            (option if isinstance(option, Option) else Option(option)).add(parser, name)
        parser.add_argument("--data", type=Path, default=DATA, help="folder of public workloads")
        parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
        program = self.program.rpartition(".")[2]
        work = ROOT / "runs" / program / self.word
        parser.add_argument("--work", type=Path, default=work, help="what is finished, to continue")
        parser.add_argument("--fresh", action="store_true", help="forget what is finished")
        if self.again is not None:
            flag = f"--{self.again.flag}"
            parser.add_argument(flag, dest="again", action="store_true", help=self.again.help)
        parser.set_defaults(study=self)

    def page(self, rows: Rows, options: Options) -> str:
        """Title, command and text; without the facts."""
        parts = self.parts(rows, options) if self.parts else {"table": table(rows, *self.columns)}
        title, _, rest = filled(self.name, vars(options) | dict(parts)).partition("\n")
        return f"{title}\n\n`{command_line(self.program, options.typed)}`\n\n{rest.lstrip()}"

    def read(self, folder: Path = RESULTS) -> list[Any]:
        """The rows of its committed results."""
        if self.row is not None:
            return read_csv(self.row, folder / f"{self.name}.csv")
        return list(json.loads((folder / f"{self.name}.json").read_text("utf-8"))["rows"])

    def besides(self, **made: Container[Any]) -> list[Any]:
        """Committed rows, but those that have one of the values in every column of ``made``."""
        return [x for x in self.read() if any(x[name] not in own for name, own in made.items())]

    def write(self, rows: Rows, options: Options, noted: Mapping[str, str] | None = None) -> None:
        """All results, the page last; with the facts of today, or those that were ``noted``."""
        facts = noted or provenance(**self.facts(options))
        if is_dataclass(rows[0]):
            files = {f"{self.name}.csv": to_csv(rows)}
        else:
            data = {"provenance": facts, "rows": rows}
            files = {f"{self.name}.json": json.dumps(data, indent=1) + "\n"}
        page = self.page(rows, options)
        listed = "".join(f"- {k}: {v}\n" for k, v in facts.items())
        files |= {**self.files(rows, options), f"{self.name}.md": f"{page}\n{listed}"}
        if self.plot is not None:
            self.plot(rows, options.out / f"{self.name}.png", options)
        for name, content in files.items():
            write_atomic(options.out / name, content)
        print(page)
        say(f"written to {options.out}: {', '.join(files)}")


def template(name: str) -> str:
    """A section of ``experiments/pages.md``, with names in braces; empty where there is none."""
    sections = re.split(r"^<!-- (\w+) -->\n", PAGES.read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(sections[1::2], sections[2::2], strict=True)).get(name, "")


def filled(name: str, values: Mapping[str, Any]) -> str:
    """A section with these values; a table's last line feed is the section's."""
    texts = {k: v.rstrip("\n") if isinstance(v, str) else v for k, v in values.items()}
    return template(name).format_map(texts).strip() + "\n"


def parse(studies: Sequence[Study], words: Sequence[str]) -> Options:
    """The options; ``options.study`` is the one that is asked for."""
    parser = argparse.ArgumentParser(prog=f"python -m {studies[0].program}")
    if len(studies) == 1 and not studies[0].word:
        studies[0].add_options(parser)
    else:
        choice = parser.add_subparsers(dest="word", required=True)
        for study in studies:
            title = template(study.name).partition("\n")[0].lstrip("# ").replace("%", "%%")
            study.add_options(choice.add_parser(study.word, help=title))
    options = parser.parse_args(words)
    options.finished, options.typed = Finished(options.work), words
    return options


def run(studies: Study | Sequence[Study], argv: Sequence[str] | None = None) -> int:
    """A command: the study that it asks for, and its exit code."""
    studies = (studies,) if isinstance(studies, Study) else studies
    words = list(sys.argv[1:] if argv is None else argv)
    options = parse(studies, words)
    study: Study = options.study
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers bring their own threads
    warnings.simplefilter("ignore", RuntimeWarning)  # what planners say is in the rows

    def work() -> int:
        if options.fresh:
            shutil.rmtree(options.work, ignore_errors=True)
        if study.again is not None and options.again:
            rows = partly_again(study.again, studies, options)
        else:
            rows = study.rows(options)
            if rows is None:
                return 0
            rows = list(rows)
            study.write(rows, options)
        return 1 if study.wrong(rows, options) else 0

    return launch(work)


def partly_again(again: Again, studies: Sequence[Study], options: Options) -> Rows:
    """Rows of which some are made again; the page keeps its command and its facts."""
    study: Study = options.study
    words, facts = origin((options.out / f"{study.name}.md").read_text("utf-8"))
    then = parse(studies, words)
    then.out, then.data = options.out, options.data
    rows = again.rows(study.read(options.out), then)
    study.write(rows, then, facts | {again.flag: provenance()["when"]})
    return rows


def origin(page: str) -> tuple[list[str], dict[str, str]]:
    """The words of the command that made a page, and the facts it noted: when, cpu, ..."""
    command = re.search(r"^`python -m \S+ ?(.*)`$", page, re.MULTILINE)
    assert command is not None
    return shlex.split(command[1]), dict(re.findall(r"^- (\w+): (.+)$", page, re.MULTILINE))


def launch(work: Callable[[], int]) -> int:
    """The exit code of ``work``, as of the other commands."""

    def explain(error: Exception) -> str | None:
        return str(error) if isinstance(error, StudyError) else cli.explain(error)

    return cli.guarded(work, explain, interrupted="interrupted; the same command continues")


# --- what is finished ----------------------------------------------------------------------------


class Finished:
    """The finished rows of a study, a JSON file each: any number of processes may add to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def row(
        self,
        kind: Callable[..., R],
        what: Any,
        make: Callable[[], R],
        name: str = "",
        keep: Callable[[R], bool] = lambda row: True,
    ) -> R:
        """The row that ``what`` (JSON values) decides: from its file, or made now.

        ``name`` is for who looks into the folder. A row that is not to be kept is made again the
        next time, and so is one of another version of ``kind``.
        """
        path = self.folder / f"{slug(name or kind.__name__)}-{digest(what)[:16]}.json"
        if path.is_file():
            try:
                return kind(**json.loads(path.read_text(encoding="utf-8")))
            except (TypeError, ValueError):
                say(f"{path} is of another version: made again")
        row = make()
        if keep(row):
            data = asdict(row) if is_dataclass(row) else row  # type: ignore[call-overload]
            write_atomic(path, json.dumps(data))
        return row


def digest(*what: Any) -> str:
    """SHA-256 (hex) of JSON values."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def slug(text: str) -> str:
    """The end of a text as part of a file's name."""
    return re.sub(r"[^\w.-]+", "_", text)[-60:]


# --- data, and what is noted ---------------------------------------------------------------------


def public(data: Path, *patterns: str) -> dict[str, Path]:
    """Files of public workloads under ``data``, by path relative to it, sorted.

    Raises:
        StudyError: there are none; the message says where they are published.
    """
    files = {
        path.relative_to(data).as_posix(): path
        for pattern in patterns
        for path in sorted(data.glob(pattern))
    }
    if not files:
        raise StudyError(
            f"no file {' or '.join(patterns)} in {data}: the workloads are public, but not part of "
            "this project. Take them from github.com/msr-fiddle/dnn-partitioning "
            "(throughput-inputs as dnn_partitioning/throughput, latency-inputs as "
            "dnn_partitioning/latency), github.com/msr-fiddle/pipedream (profiles, each graph.txt "
            "as pipedream/NAME.txt), github.com/xinyuyao/Doppler (compute_graph as doppler) and "
            "github.com/moirai-placement/moirai (spreadsheets, converted to moirai/NAME.json), and "
            "name the folder with --data"
        )
    return files


def provenance(**facts: Any) -> dict[str, Any]:
    """When, where and with which versions."""
    from placement.costs.measure import provenance

    versions = {name: version(name) for name in ("numpy", "numba", "scipy", "ortools")}
    return provenance(**(versions | facts))


def command_line(module: str, words: Sequence[str]) -> str:
    """The command that makes the results again; of folders elsewhere the last name alone."""
    arguments = shlex.join(Path(w).name if w[:1] == "/" else w for w in words)
    return f"python -m {module} {arguments}".rstrip()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
