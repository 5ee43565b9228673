"""The plan: a decision as a file that other programs and other machines can trust.

A plan is JSON of a strict, versioned schema (``docs/plan.schema.json``). It is data and nothing
else: loading one imports nothing that it names. It knows operators and devices by *name*, and
holds fingerprints, so that it is refused, with the reason, for a model or a machine that it was
not made for.

``content``: the keys, of ``parts``; ``document``: ``Plan``, which can do something with them;
``reading`` and ``checking``: files of others; ``comparing``: graphs, clusters and machines that may
be others; ``making``: a plan of a planner's answer.
"""

# ruff: noqa: F401
from placement.plan.document import Plan
from placement.plan.making import make_plan, memory_excess, now, parameters_of, proved_bound_s
from placement.plan.parts import (
    ClusterInfo,
    DeviceInfo,
    Fallback,
    GraphInfo,
    Limits,
    LinkInfo,
    Measured,
    PlanError,
    PlanMismatch,
    PlannerInfo,
    Predicted,
    Provenance,
    Spread,
    Stage,
    ancestry,
    graph_parts,
    stages_of,
    whole_modules,
)
from placement.plan.reading import load_plan, read_plan, schema_text
