"""What is wrong with a file of strict records (pydantic's), in plain words."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from placement.tools.files import short, some
from placement.tools.named import meant


def explain(error: ValidationError, base: type[BaseModel], data: Any = None) -> str:
    """Each wrong key with its value and what is expected there.

    ``base`` is the class of all records. ``data`` is what was read, if anything was: records in
    lists are called by their ``name``, or ``id``, too.
    """
    keys = {key for kind in base.__subclasses__() for key in kind.model_fields}
    every = error.errors(include_url=False)
    return some([_explain_one(dict(e), keys, data) for e in every], sep="; ", most=3)


def _explain_one(e: dict[str, Any], keys: set[str], data: Any) -> str:
    where, at = "", data
    for step in e["loc"]:
        is_item = isinstance(at, list) and isinstance(step, int)
        at = at[step] if is_item else at.get(step, _ABSENT) if isinstance(at, dict) else _ABSENT
        if at is _ABSENT and data is not None and e["type"] != "missing":
            break  # a word of pydantic's own, not a part of the file
        where += f"[{step}]" if isinstance(step, int) else f".{str(step)[:60]}"
        name = at.get("name", at.get("id")) if isinstance(at, dict) else None
        if isinstance(step, int) and isinstance(name, str | int):
            where += f" ({(name[:60] if isinstance(name, str) else name)!r})"
    where = where.removeprefix(".")
    if e["type"] == "missing":
        return f"the key {where!r} is missing"
    if e["type"] == "extra_forbidden":
        unknown = str(e["loc"][-1])
        return f"unknown key {where!r}{meant(unknown, sorted(keys - {unknown}))}"
    return f"{where or 'it'} = {short(e['input'])}: {e['msg'][:1].lower()}{e['msg'][1:]}"


_ABSENT = object()
