"""The documentation is true: links lead somewhere, code runs, commands exist.

In the files of ``docs/`` and in the README, blocks run in the order in which they are written, in
an empty folder:

* ```` ```python ```` is executed; the blocks of one file share their names;
* ```` ```sh ````, or no language: every ``placement`` command is carried out and must return 0;
* ``file=NAME`` after the language writes the block to a file instead;
* ``no-run`` after the language: not executed. Commands are still parsed.
"""

import contextlib
import importlib.util
import io
import itertools
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gymnasium.envs.registration import registry

import envs  # noqa: F401 (registers them)
from envs.formulations import FORMULATIONS
from experiments import results
from placement.__main__ import VERBS, build_parser, main

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, *sorted(ROOT.glob("*.md"))]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


class Block(NamedTuple):
    language: str
    marks: list[str]
    text: str
    line: int

    @property
    def file(self) -> str | None:
        names = [m.removeprefix("file=") for m in self.marks if m.startswith("file=")]
        return names[0] if names else None


def blocks(page: str) -> Iterator[Block]:
    for match in FENCE.finditer(page):
        line = page.count("\n", 0, match.start(3))
        yield Block(match[1], match[2].split(), match[3], line)


def commands(block: Block) -> Iterator[list[str]]:
    """The arguments of each ``placement`` line, up to a pipe; a backslash continues it."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language in ("sh", "") and re.match(r"(\.venv/bin/)?placement ", line):
            words = shlex.split(line, comments=True)[1:]
            yield list(itertools.takewhile(lambda w: w not in ("|", ">"), words))


def prose(page: str) -> str:
    return FENCE.sub("", page)


def anchors(page: str) -> set[str]:
    """Headings as GitHub names them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_page_is_in_the_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", index, re.MULTILINE | re.DOTALL)
    listed = [x for tree in trees for x in tree.splitlines() if x and not x.startswith(":")]
    missing = {p.stem for p in DOCS} - {"index"} - set(listed)
    assert not missing, f"add {missing} to a toctree of docs/index.md"
    assert len(listed) == len(set(listed))
    for name in listed:
        assert (ROOT / "docs" / f"{name}.md").exists(), name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in LINK.findall(prose(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else page.parent / path
        if not there.exists() or (there.is_dir() and page.parent != ROOT):
            wrong.append(target)  # a site of these pages has no folders
        elif anchor and anchor not in anchors(there.read_text()):
            wrong.append(f"{target} (no such heading)")
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_level_of_headings_is_skipped(page: Path) -> None:
    levels = [len(x) for x in re.findall(r"^(#+) ", prose(page.read_text()), re.MULTILINE)]
    assert all(low <= high + 1 for high, low in itertools.pairwise(levels))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_mentioned_commands_exist(page: Path) -> None:
    text = page.read_text()
    mentioned = re.findall(r"`placement ([a-z]+)", prose(text))
    assert set(mentioned) <= set(VERBS)
    for block in blocks(text):
        for arguments in commands(block):
            try:
                args, rest = build_parser().parse_known_args(arguments)
            except SystemExit:
                pytest.fail(f"{page.name}:{block.line}: placement {shlex.join(arguments)}")
            assert not [x for x in rest if x.startswith("-") or not hasattr(args, "options")]


def test_every_command_is_in_the_table() -> None:
    rows = [line for line in (ROOT / "docs" / "cli.md").read_text().splitlines() if "| `" in line]
    assert set(re.findall(r"`placement ([a-z]+)`", "\n".join(rows))) == set(VERBS)


def test_every_environment_is_in_the_table() -> None:
    """Once, with the formulation that acts in it."""
    head, *rows = table_after((ROOT / "docs" / "environments.md").read_text(), "# Environments")
    cells = [{k: re.findall(r"`([^`]+)`", v) for k, v in zip(head, r, strict=True)} for r in rows]
    columns = ("id", "`training.formulation`")
    ids, formulations = ([name for row in cells for name in row[x]] for x in columns)
    registered = [k for k, v in registry.items() if v.namespace == "envs"]
    assert sorted(ids) == sorted(registered)
    assert sorted(formulations) == sorted(FORMULATIONS)


@pytest.mark.usefixtures("quick_profiles")
@pytest.mark.parametrize("page", [*DOCS, ROOT / "README.md"], ids=name_of)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(work)
    module = types.ModuleType("docs_example")  # dataclasses look up the module of a class
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = set(sys.modules)
    try:
        for block in blocks(page.read_text()):
            if block.file is not None:
                (work / block.file).write_text(block.text)
            elif "no-run" not in block.marks:
                run_block(page, block, vars(module))
    finally:
        for name in set(sys.modules) - before:  # the files of one page are not another's
            if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(work)):
                del sys.modules[name]


def run_block(page: Path, block: Block, names: dict[str, Any]) -> None:
    """In less time than a reader's: who learns as long as is said, and that it helps, is tested."""
    if block.language == "python":
        text = re.sub(r"\.learn\([\d_]+\)", ".learn(1)", block.text)
        text = text.replace("optimize(module, inputs)", "optimize(module, inputs, seconds=0.3)")
        text = text.replace("seconds=1)", "seconds=0.3)")
        text = text.replace("hidden_layers=2", "hidden_layers=1")
        # Line numbers of the page, so that a traceback points into it.
        exec(compile("\n" * block.line + text, str(page), "exec"), names)
    for arguments in commands(block):
        if arguments[0] == "profile" and "--repeats" not in arguments:
            arguments += ["--repeats", "2"]
        if arguments[0] == "optimize":
            arguments += ["--seconds", "0.3"]
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            code = main(arguments)
        assert code == 0, f"{page.name}:{block.line}: {shlex.join(arguments)}: {stderr.getvalue()}"


def test_the_reader_of_pages_finds_blocks_commands_and_headings() -> None:
    page = (
        "# One `two`-three\n```python no-run\nx = 1\n```\n"
        "```sh\nls\nplacement plan a \\\n -o b | head  # why\n```\n```yaml file=c.yaml\nd: 1\n```\n"
    )
    code, shell, data = blocks(page)
    assert (code.language, code.marks, code.text, code.line) == ("python", ["no-run"], "x = 1\n", 2)
    assert list(commands(shell)) == [["plan", "a", "-o", "b"]]
    assert data.file == "c.yaml"
    assert anchors(page) == {"one-two-three"}


def reference(name: str = "make_plan_reference") -> Any:
    """A script of ``docs/``, as a module."""
    path = ROOT / "docs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plan_reference_is_up_to_date() -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    assert page == reference().updated(page), "run: python docs/make_plan_reference.py"


def test_plan_reference_wants_a_meaning_for_every_key() -> None:
    script = reference()
    known = {"schema_version": {"const": 1}, "colour": {"type": "string"}}
    schema = {"properties": known, "required": [], "$defs": {}}
    with pytest.raises(KeyError, match=r"Plan\.colour"):
        script.tables(schema, {"Plan.schema_version": "Its version."})


def test_no_result_is_forgotten() -> None:
    page = (ROOT / "docs" / "reproduce.md").read_text()
    results.reproduction(page, results.RESULTS)
    without = re.sub(r"^\| \[md\]\(.*/scale\.md.*\n", "", page, flags=re.MULTILINE)
    with pytest.raises(KeyError, match=r"'scale'.*add a row"):
        results.reproduction(without, results.RESULTS)
    for stem in committed():
        command, at, facts = results.made_by(stem, results.RESULTS)
        words = command.split()
        study = words[1] if words[0] == "experiments.learned" else ""
        file = f"{words[0].replace('.', '/')}{study and '/'}{study}.py"
        if not at:
            assert (ROOT / file).exists() or (ROOT / file).with_suffix("").is_dir(), command
        elif (ROOT / ".git").exists():  # it was there then; another may have its name now
            there = f"{at.removeprefix(' at `').rstrip('`')}:{file}"
            subprocess.run(["git", "-C", str(ROOT), "cat-file", "-e", there], check=True)
        assert {"when", "cpu", "cores"} <= set(facts), stem


def committed() -> set[str]:
    """The studies that have results."""
    return {path.stem.removesuffix("_curve") for path in results.RESULTS.iterdir()}


def test_readme_quotes_results_with_their_commands() -> None:
    """Each number of the README has a command, and each command there leads to a committed file."""
    readme = (ROOT / "README.md").read_text()
    commands = set(re.findall(r"python -m experiments\.(\w+)", readme))
    origins = {results.made_by(stem, results.RESULTS)[0] for stem in committed()}
    assert commands <= {c.split()[0].removeprefix("experiments.") for c in origins}


def table_after(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table after ``heading``, without marks; the header first."""
    under = text.split(heading)[1].splitlines()
    lines = itertools.dropwhile(lambda x: not x.startswith("|"), under)
    rows = itertools.takewhile(lambda x: x.startswith("|"), lines)
    cells = [[c.strip(" *") for c in row.strip().strip("|").split("|")] for row in rows]
    return [row for row in cells if set("".join(row)) - set("-:")]


def test_every_picture_is_shown_and_every_shown_picture_is_there() -> None:
    pytest.importorskip("matplotlib")
    drawn = {f"{name}.svg" for name in reference("make_pictures").PICTURES}
    files = {p.name for p in (ROOT / "docs" / "img").iterdir()}
    shown = set()
    for page in PAGES:
        shown |= set(re.findall(r"!\[[^\]]+\]\((?:docs/)?img/([^)]+)\)", page.read_text()))
    assert {name for name in files if name.endswith(".svg")} == drawn
    assert shown == files


def test_pictures_come_out_the_same(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    pinned = re.search(r"^matplotlib==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if pinned is None or matplotlib.__version__ != pinned[1]:
        pytest.skip(f"the pictures are of another matplotlib than {matplotlib.__version__}")
    drawn = reference("make_pictures").draw("timeline", tmp_path).read_text()
    assert drawn == (ROOT / "docs" / "img" / "timeline.svg").read_text()
