"""A plan from a file that anybody may have written: read whole, or refused with what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from placement.plan.document import Plan
from placement.plan.parts import PlanError, Strict
from placement.tools.files import check_is_file, model_file, parse_json, read_text, short, some
from placement.tools.limits import MOST
from placement.tools.strict import explain

SCHEMA_VERSIONS = (1, 2, 3)  # 2: with phases; 3: with pieces


def load_plan(path: str | Path) -> Plan:
    """Read a plan and check that it does not contradict itself.

    Raises:
        PlanError: missing, too large, not UTF-8, truncated, of another schema version, with
            unknown keys or wrong values, or inconsistent; the message names the key.
    """
    plan = read_plan(path)
    wrong = plan.inconsistencies()
    if wrong:
        raise PlanError(
            f"{path}: {some(wrong, sep='; ')}. Was it edited by hand? "
            "Make it again, with placement plan MODEL --out plan.json, or by hand with make_plan "
            "(docs/plan.md)"
        )
    return plan


def read_plan(path: str | Path) -> Plan:
    """As ``load_plan``, without the check for contradictions (see ``Plan.inconsistencies``)."""
    path = Path(path)
    text = _text(path)
    data = _data(path, text)
    version = data["schema_version"]
    if version not in SCHEMA_VERSIONS or isinstance(version, bool):
        raise PlanError(
            f"{path}: schema_version = {short(version)}, this version reads "
            f"{' and '.join(map(str, SCHEMA_VERSIONS))}: "
            "install the version that wrote the plan, or make it again: placement plan"
        )
    try:
        return Plan.model_validate_json(_without_sleep(path, data, text))
    except ValidationError as error:
        raise PlanError(f"{path}: {explain(error, Strict, data)}") from error


def _text(path: Path) -> str:
    try:
        size, text = check_is_file(path), ""
        if size <= MOST.plan_bytes:
            text = read_text(path)
            size = max(size, len(text))  # of what was compressed
        if size > MOST.plan_bytes:
            raise PlanError(f"{path}: {size} bytes, a plan has at most {MOST.plan_bytes}")
        return text
    except UnicodeDecodeError as error:
        what = model_file(path, error.object) or f"byte {error.start} is not UTF-8"
        raise PlanError(f"{path}: not a plan: {what}") from error
    except OSError as error:
        advice = ""
        if isinstance(error, FileNotFoundError):
            model = path.name if ":" in path.name else "MODEL"
            advice = f"; a plan is a file, and made with: placement plan {model} --out plan.json"
        raise PlanError(f"{path}: cannot be read: {error.strerror}{advice}") from error


def _data(path: Path, text: str) -> dict[str, Any]:
    """The JSON object, which says its version and names no code."""
    try:
        data = parse_json(text)
    except ValueError as error:
        if what := model_file(path, text.encode()):
            raise PlanError(f"{path}: not a plan: {what}") from error
        raise PlanError(
            f"{path}: not valid JSON ({error}): truncated, or edited by hand? "
            "Make it again: placement plan MODEL --out plan.json"
        ) from error
    if _holds_target(data):
        raise PlanError(
            f"{path}: the key '_target_' is not part of a plan: plans hold data, never code"
        )
    if not isinstance(data, dict) or "schema_version" not in data:
        raise PlanError(f"{path}: not a plan: there is no key 'schema_version'")
    return data


def _holds_target(value: Any) -> bool:
    """Whether Hydra's key for a class to be called is anywhere in it."""
    if isinstance(value, dict):
        return "_target_" in value or any(map(_holds_target, value.values()))
    return isinstance(value, list) and any(map(_holds_target, value))


def _without_sleep(path: Path, data: dict[str, Any], text: str) -> str:
    """The text without keys of sleep, which older files have for every device, mostly as null.

    Raises:
        PlanError: a device sleeps, and the plan's values count on it.
    """
    if '"sleep_' not in text:
        return text
    try:
        for device in data["cluster"]["devices"]:
            keys = ("sleep_w", "sleep_after_s", "sleep_exit_s")
            watts, *_ = [device.pop(key, None) for key in keys]
            if watts is not None:
                raise PlanError(
                    f"{path}: device {short(device.get('name'))} has sleep_w = {short(watts)}, but "
                    "devices that sleep are no longer modelled: plan again without it in the "
                    "cluster's file"
                )
    except (LookupError, TypeError, AttributeError):  # no such devices: the schema says so
        pass
    return json.dumps(data)


def schema_text() -> str:
    """The JSON schema of the file, as published in ``docs/plan.schema.json``."""
    schema = Plan.model_json_schema()
    schema["required"].insert(0, "schema_version")  # as the reader demands
    return json.dumps(schema, indent=1) + "\n"
