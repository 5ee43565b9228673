"""Exporters: one file per program that a plan is handed to, ``exporter(plan) -> Exported``.

An exporter is a frozen dataclass whose fields are its options; ``vllm`` lives in ``vllm.py`` as
the class ``Vllm``, whose docstring names the source of the format. ``load`` finds it by the name
of the file, or finds yours by ``package.module:Class``; nothing is registered anywhere.

Most programs can express less than a plan. An exporter never rounds in silence: it raises
``Inexpressible``, which says what does not fit and carries the nearest assignment that does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from placement.plan import Plan, stages_of
from placement.problem import Problem
from placement.tools.named import Named


class ExportError(ValueError):
    """No such exporter or option, or a plan that lacks what the format needs."""


class Inexpressible(ExportError):
    """The format cannot say what the plan says.

    Attributes:
        nearest: operator -> device: what can be said, of least cost, or with few operators moved.
    """

    def __init__(self, message: str, nearest: Mapping[str, str]) -> None:
        super().__init__(message)
        self.nearest = dict(nearest)


@dataclass(frozen=True)
class Exported:
    """What an exporter writes.

    Attributes:
        files: suffix -> content. The suffix ``""`` is the file that the user named, every other
            replaces that file's suffix: ``{"": script, ".json": data}``.
        note: one line: what to do with it, and what it cannot say.
        check: of a language model's plan, the command that measures what is predicted of it;
            ``MODEL`` is the model.
    """

    files: Mapping[str, str | bytes]
    note: str
    check: str = ""


class Exporter(Protocol):
    """``exporter(plan) -> Exported``; ``problem`` is there where the caller has it."""

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported: ...


def moved(plan: Plan, assignment: Mapping[str, str]) -> Plan:
    """The plan with operators elsewhere; its order and measurements are not about that.

    What is predicted stays that of the original: a copy to export, not to save.
    """
    update: dict[str, Any] = {"assignment": dict(assignment), "order": None, "measured": None}
    update["stages"] = stages_of([*assignment], [*assignment.values()])
    if plan.phases:
        update |= {"phases": (), "schema_version": 3 if plan.pieces else 1}
    return plan.model_copy(update=update)


def lacks(plan: Plan, what: str) -> ExportError:
    """The plan does not know what the format needs, as it is of a problem file or an old one."""
    return ExportError(
        f"the plan of {plan.graph.name!r} does not know {what} (it was made from a problem file, "
        "or by an older version): make it again from the model, placement plan "
        "package.module:function --out plan.json"
    )


def require_one_phase(plan: Plan) -> None:
    """What no other program can express: that micro-batches take turns.

    Raises:
        Inexpressible: they do; the nearest is the phase that most of them are in.
    """
    if plan.phases:
        raise Inexpressible(
            f"the plan has {len(plan.assignments)} phases, in which micro-batches take turns; no "
            "other program does that. --nearest runs all of them as most are run",
            max(plan.assignments, key=plan.assignments.count),
        )


def require_whole(plan: Plan) -> None:
    """What programs that place modules cannot express.

    Raises:
        ExportError: operators of the plan are cut into pieces.
    """
    if plan.pieces is not None and plan.pieces.operators:
        names = [*plan.pieces.operators]
        raise ExportError(
            f"the plan has {len(names)} operators in pieces, the first is {names[0]!r}: this "
            "format places whole ones; plan without --pieces for it"
        )


_EXPORTERS: Named[Exporter] = Named(__name__, "exporter", ExportError)
#: Those of this package by name; the one of a name, with options; and its class.
names, load, find = _EXPORTERS.names, _EXPORTERS.load, _EXPORTERS.find
