"""Write the tables of ``docs/plan.md`` from ``docs/plan.schema.json``.

    python docs/make_plan_reference.py

Keys, types and which of them are required come from the schema; the column *meaning* is written by
hand in the page and kept. A key without a meaning, or a meaning without a key, is an error.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"

# The order of the tables, and what each object is.
OBJECTS = {
    "Plan": "The file",
    "PlannerInfo": "`planner`: who decided",
    "GraphInfo": "`graph`: which model",
    "ClusterInfo": "`cluster`: which devices",
    "DeviceInfo": "`cluster.devices[]`",
    "LinkInfo": "`cluster.links[]`",
    "PiecesInfo": "`pieces`: what is cut",
    "CutInfo": "`pieces.operators[]`: how an operator is cut",
    "Stage": "`stages[]`",
    "Predicted": "`predicted`: what the simulator says",
    "Measured": "`measured`: what a run gave",
    "Spread": "`measured.latency_s`, `measured.period_s`",
    "Limits": "`limits`: memory",
    "Fallback": "`fallback`: the best single device",
    "Provenance": "`provenance`: where the plan comes from",
}


def meanings(page: str) -> dict[str, str]:
    """What the page says of every ``Object.key``."""
    named = {title: name for name, title in OBJECTS.items()}
    said: dict[str, str] = {}
    for title, table in re.findall(r"^### (.+)\n\n((?:\|.*\n)+)", page, re.MULTILINE):
        for key, meaning in re.findall(r"^\| `(\w+)` \|.*\| (?:yes|no) \| (.+) \|$", table, re.M):
            said[f"{named[title]}.{key}"] = meaning
    return said


def tables(schema: dict[str, Any], said: dict[str, str]) -> str:
    """One Markdown table per object of the schema; ``said``: its keys' ``meanings``.

    Raises:
        KeyError: an object or a key that nothing is written about, or one that there is not.
    """
    objects = {"Plan": schema} | {k: v for k, v in schema["$defs"].items() if "properties" in v}
    for name in objects:
        if name not in OBJECTS:
            raise KeyError(f"{name}: add it to OBJECTS")
    keys = {f"{name}.{key}" for name, x in objects.items() for key in x["properties"]}
    if keys != said.keys():
        wrong = sorted(keys ^ said.keys())
        raise KeyError(f"{wrong}: each key of the schema needs a row in docs/plan.md, others none")
    parts = []
    for name, title in OBJECTS.items():
        required = objects[name].get("required", [])
        rows = [f"### {title}\n", "| key | type | required | meaning |", "|---|---|---|---|"]
        for key, value in objects[name]["properties"].items():
            needed = "yes" if key in required else "no"
            rows.append(f"| `{key}` | {_type(value)} | {needed} | {said[f'{name}.{key}']} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _type(value: dict[str, Any]) -> str:
    """A type of the schema in words."""
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[1]
        return "any JSON" if name == "JsonValue" else f"[{name}](#{_anchor(OBJECTS[name])})"
    if "const" in value:
        return f"{value['const']}"
    if "enum" in value:
        return " or ".join(f"`{x}`" for x in value["enum"])
    if "anyOf" in value:
        return " or ".join(_type(x) for x in value["anyOf"])
    kind = value["type"]
    if kind == "array" and "prefixItems" in value:
        return "(" + ", ".join(_type(x) for x in value["prefixItems"]) + ")"
    if kind == "array":
        return f"list of {_type(value['items'])}"
    if kind == "object":
        inner = [*value.get("patternProperties", {}).values(), value.get("additionalProperties")]
        return f"map to {_type(inner[0])}"
    if kind == "string":
        return "hex digits" if "0-9a-f" in value.get("pattern", "") else "text"
    if kind in ("integer", "number") and "minimum" in value:
        return f"{kind} ≥ {value['minimum']}"
    return str(kind)


def _anchor(title: str) -> str:
    """The heading as a link target, as GitHub makes it."""
    letters = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return letters.replace(" ", "-")


def updated(page: str) -> str:
    """The page with new tables between its two marks."""
    schema = json.loads((DOCS / "plan.schema.json").read_text(encoding="utf-8"))
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{tables(schema, meanings(page))}\n{END}{after}"


if __name__ == "__main__":
    PAGE = DOCS / "plan.md"
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
