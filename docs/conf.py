"""Sphinx builds the site: ``make docs``. The pages are Markdown, and are read as they are too.

The source folder is the root of the repository, so that links to results and to the log lead to
pages of the site. The pages of the API reference are written here, one per package, and are not
kept.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

project = "device-placement-rl"
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/api/*.rst",
    "experiments/**.md",
    "agents/released/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = ["experiments/pages.md"]  # what pages of results are filled into
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4  # links to headings, as GitHub makes them
# Results are reached by links; that every page of docs/ is in the contents is a test. Annotations
# have short names, and two packages may have the same one.
suppress_warnings = ["toc.not_included", "ref.python"]
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # attributes of dataclasses are described once
html_theme = "furo"
html_title = project
html_copy_source = False
html_show_copyright = False

# What is for users; the rooms that planners are made of are not.
ROOMS = (
    "plan", "capturing", "planners", "schedulers", "simulator", "costs", "executor", "runs",
    "importers", "exporters", "report", "workloads",
)  # fmt: skip

INNER = ("kernels", "table", "run_state")
RE_EXPORTS = ("placement", "placement.executor")  # their names are described where they are defined


def public_modules(package: str) -> list[str]:
    """The package and its modules that are for users."""
    if package == "placement.capturing":
        return [package]  # one function; the rest is how
    modules = pkgutil.iter_modules(import_module(package).__path__)
    names = [m.name for m in modules if not (m.name[0] == "_" or m.name.endswith(INNER))]
    files = [n for n in names if not (package == "placement" and (ROOT / package / n).is_dir())]
    return [package, *(f"{package}.{name}" for name in files)]


def write_reference(app: Any) -> None:
    """A page per package."""
    folder = ROOT / "docs" / "api"
    folder.mkdir(exist_ok=True)
    for package in ("placement", *(f"placement.{room}" for room in ROOMS), "envs", "agents"):
        parts = [f"{package}\n{'=' * len(package)}\n"]
        for module in public_modules(package):
            if module != package:
                parts.append(f"{module}\n{'-' * len(module)}\n")
            parts.append(f".. automodule:: {module}\n")
            if module in RE_EXPORTS:
                here = import_module(module)
                named = {name: getattr(here, name) for name in here.__all__}
                links = [f":obj:`{n} <{x.__module__}.{n}>`" for n, x in named.items()]
                parts[-1] += "   :no-members:\n"
                parts.append(f"Imported from here: {', '.join(links)}.\n")
        path = folder / f"{package.rpartition('.')[2]}.rst"
        path.write_text("\n".join(parts), encoding="utf-8")


def in_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """A docstring as napoleon reads it.

    Indented lines after a colon and an empty line are code or a drawing. Of several names that are
    described together it would take the first for a type. Of a field of a named tuple Python's own
    docstring says nothing.
    """
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        block = lines[i + 1 : i + 3]
        if line.endswith(":") and len(block) == 2 and not block[0]:
            lines[i] += ":" * block[1].startswith(" " * (indent + 4))
        lines[i] = re.sub(
            r"^ +(\w+, )+\w+(?=: )", lambda names: names[0].replace(", ", ","), lines[i]
        )


def short(app: Any, what: str, name: str, obj: Any, options: Any, *texts: str | None) -> Any:
    """A signature and what is returned, with arrays as they are written in the code."""

    def shorter(text: str | None) -> str | None:
        if text is None:
            return None
        array = r"ndarray\[tuple\[Any, \.\.\.\], dtype\[(\w+)\]\]"
        return re.sub(array, r"NDArray[\1]", re.sub(r"~(\w+\.)+", "", text))

    return tuple(map(shorter, texts))


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", in_rst, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", short)
    app.connect("builder-inited", write_reference)
