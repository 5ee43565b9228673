"""Sphinx builds the site: ``make docs``. The pages are Markdown, and are read as they are too.

The source folder is the root of the repository, so that links to results and to the log lead to
pages of the site.
"""

from __future__ import annotations

project = "device-placement-rl"
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "experiments/**.md",
    "agents/released/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = ["experiments/pages.md"]  # what pages of results are filled into
extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 4  # links to headings, as GitHub makes them
# Results are reached by links; that every page of docs/ is in the contents is a test.
suppress_warnings = ["toc.not_included"]
html_theme = "furo"
html_title = project
html_copy_source = False
html_show_copyright = False
