"""A table of operators for spreadsheets and scripts."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

from placement.exporters import Exported, require_one_phase
from placement.plan import Plan
from placement.problem import Problem


@dataclass(frozen=True)
class Csv:
    """CSV, a row per operator: number, operator, module, device, stage, priority.

    Format: RFC 4180, UTF-8. ``stage`` counts runs of operators on one device from 0. A name that
    a spreadsheet would take for a formula begins with an apostrophe.
    """

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        require_one_phase(plan)
        stage = [i for i, s in enumerate(plan.stages) for _ in range(s.num_ops)]
        modules = plan.graph.modules or ("",) * plan.graph.num_ops
        text = io.StringIO(newline="")
        rows = csv.writer(text)
        rows.writerow(["number", "operator", "module", "device", "stage", "priority"])
        for i, (op, device) in enumerate(plan.assignment.items()):
            names = (_inert(x) for x in (op, modules[i], device))
            rows.writerow([i, *names, stage[i], plan.priority[i]])
        return Exported({"": text.getvalue()}, f"{plan.graph.num_ops} operators")


def _inert(name: str) -> str:
    return f"'{name}" if name[:1] in tuple("=+-@") else name
