"""The house: few files at the root, public rooms, no circles, functions that fit on a page."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import grimp
import networkx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("placement", "envs", "agents", "conf", "experiments")
SOURCES = sorted(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))
MOST_LINES, MOST_PARAMETERS, MOST_FILES, MOST_NUMBERS = 120, 9, 18, 120


@cache
def imports() -> grimp.ImportGraph:
    """Imports inside functions count, as do those for type checkers alone."""
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)


@cache
def functions() -> list[tuple[str, int, int]]:
    """Where they are, their lines and their parameters."""
    rows = []
    for path in SOURCES:
        for f in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
                count = len([x for x in names if x not in ("self", "cls")])
                assert f.end_lineno is not None
                where = f"{path.relative_to(ROOT)}:{f.lineno} {f.name}"
                rows.append((where, f.end_lineno - f.lineno, count))
    return rows


def test_the_root_of_placement_shows_the_nouns() -> None:
    assert len(list((ROOT / "placement").glob("*.py"))) <= MOST_FILES


def test_what_others_import_is_public() -> None:
    graph, wrong = imports(), []
    for module in graph.modules:
        package, _, name = module.rpartition(".")
        if name.startswith("_") and name != "__main__":
            users = graph.find_modules_that_directly_import(module)
            wrong += [f"{u} -> {module}" for u in users if not u.startswith(package)]
    assert not wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = imports()
    arrows = networkx.DiGraph(
        (module, other)
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
    )
    circles = [sorted(x) for x in networkx.strongly_connected_components(arrows) if len(x) > 1]
    assert not circles


def test_no_function_is_long() -> None:
    assert not [where for where, lines, _ in functions() if lines >= MOST_LINES]


def test_no_function_has_many_parameters() -> None:
    assert not [(where, count) for where, _, count in functions() if count > MOST_PARAMETERS]


def test_few_numbers_have_a_name_at_the_top_of_a_module() -> None:
    """Others are fields of documented objects, or stand at their one use."""
    names, number = list[str](), set("0123456789_.e+-*/<(), ")
    for path in (ROOT / "placement").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            if set(ast.unparse(node.value)) <= number:
                stored = [x for x in ast.walk(node) if isinstance(x, ast.Name)]
                names += [x.id for x in stored if isinstance(x.ctx, ast.Store)]
    assert len(names) <= MOST_NUMBERS, names


@pytest.mark.parametrize("package", ["placement", "envs", "agents"])
def test_the_walk_names_every_room(package: str) -> None:
    """docs/architecture.md: every file at the root of a package, and every folder, once."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    there = {
        f"{package}/{p.name}" + ("/" if p.is_dir() else "")
        for p in (ROOT / package).iterdir()
        if (p.suffix == ".py" or (p / "__init__.py").exists()) and not p.name.startswith("__")
    }
    named = set(re.findall(rf"`({package}/[\w.]+/?)`", page))
    assert named == there


WITHOUT = {  # what runs, and the packages that nothing of it imports
    "import placement.runs.compare, placement.report.gantt, placement.report.table": (
        "matplotlib", "torch", "rich", "numba", "scipy"
    ),
    "from placement import workloads; workloads.names()": ("torch",),
    "from placement.workloads.synthetic import families; families()['inception'](0)": ("torch",),
    "from placement import planners; assert 'heft' in planners.names()": ("numba",),
    "from agents.cli.compare import main; assert not main(['--help'])": ("numba", "torch", "scipy"),
}  # fmt: skip


@pytest.mark.parametrize("code", WITHOUT)
def test_what_is_not_needed_is_not_imported(code: str) -> None:
    code += f"; import sys; print(set({WITHOUT[code]}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1:] == ["set()"], done
