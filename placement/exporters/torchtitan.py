"""torchtitan: the modules of each pipeline stage, and the schedule."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from placement.exporters import Exported
from placement.exporters._modules import Forward, actions, layer_units, members_of, served_format
from placement.plan import Plan
from placement.problem import Problem


@dataclass(frozen=True)
class Torchtitan:
    """JSON of ``ParallelismConfig`` fields, ``module_fqns_per_model_part`` first; schedule CSV.

    Format: ``torchtitan/config/configs.py`` (``ParallelismConfig``) and ``_pipeline_module_split``
    in ``torchtitan/distributed/pipeline_parallel.py``: children of the model are whole, but a
    list of layers is split by its items (``layers.3``). Part ``i`` is on pipeline rank ``i``
    modulo the number of ranks. The CSV, written for training plans with an order, is what
    ``_PipelineScheduleRuntime._load_csv`` of torch reads: a row per rank, actions as ``0F0``.
    Operators that the model runs itself go with the modules around them. Of a language model
    without its weights modules have the names of torchtitan's own
    (``_generate_llm_fqn_per_model_part``): ``tok_embeddings``, ``layers.N``, ``norm``, ``lm_head``.
    Modules that share a parameter are in one stage: torchtitan refuses others ("Weight tying is not
    supported with Pipeline Parallel", ``torchtitan/models/common/decoder.py``).
    """

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        forward = Forward.of(plan, problem, groups=True)
        names = [_kept_whole(path, forward.module) for path in forward.module]
        if served_format(plan) is not None:
            names = _own_names(forward)
        labels = [x for x in dict.fromkeys(names) if x]
        unit = [labels.index(x) if x else -1 for x in names]
        whole, said = _tied_whole(forward.shared(unit), labels)
        unit = [whole[u] if u >= 0 else -1 for u in unit]
        parts = forward.chain(unit, said, "torchtitan")
        ranks = list(dict.fromkeys(part.device for part in parts))
        config: dict[str, object] = {
            "module_fqns_per_model_part": [
                [x for x, u in zip(labels, whole, strict=True) if p.first <= u <= p.last]
                for p in parts
            ],
            "pipeline_parallel_degree": len(ranks),
            "pipeline_parallel_schedule": "1F1B" if len(ranks) == len(parts) else "Interleaved1F1B",
        }
        if (ways := len(members_of(plan, parts, "torchtitan")[0])) > 1:
            config["tensor_parallel_degree"] = ways
        files = {}
        note = f"fields of ParallelismConfig; ranks are {', '.join(ranks)}"
        if plan.order is not None and plan.graph.mode == "training":
            rows = actions(forward, unit, parts)
            files[".csv"] = "\n".join(",".join(row) for row in rows) + "\n"
            config["pipeline_parallel_schedule"] = "_PipelineScheduleRuntime"
            note += "; pipeline_parallel_schedule_csv is the path of the .csv"
        return Exported({"": json.dumps(config, indent=1) + "\n", **files}, note)


def _tied_whole(
    shared: Mapping[str, Sequence[int]], labels: Sequence[str]
) -> tuple[list[int], list[str]]:
    """Modules, of which those that share a parameter are one unit, with all between them.

    Args:
        shared: parameter -> numbers of the modules that read it.
        labels: ``[U]`` the modules.

    Returns:
        ``[U]`` the unit of each module; what units are called in messages.
    """
    unit = list(range(len(labels)))
    names = {u: repr(label) for u, label in enumerate(labels)}
    for parameter, readers in shared.items():
        first, last = unit[readers[0]], unit[readers[-1]]
        names[first] = (
            f"{labels[readers[0]]!r} to {labels[readers[-1]]!r} (they share {parameter!r}, and "
            "torchtitan has no weight tying with pipeline parallelism: untie the model, "
            "tie_word_embeddings: false, and plan again)"
        )
        unit = [first if first <= u <= last else u for u in unit]
    order = sorted(set(unit))
    return [order.index(u) for u in unit], [names[u] for u in order]


def _own_names(forward: Forward) -> list[str]:
    """Modules of torchtitan's models for those of a decoder."""
    _, unit, num_layers = layer_units(forward, None)
    names = {0: "tok_embeddings"} | {u: f"layers.{u - 1}" for u in range(1, num_layers + 1)}
    behind = chain(["norm"], repeat("lm_head"))
    return [names[u] if u <= num_layers else next(behind) for u in unit]


def _kept_whole(path: str, modules: tuple[str, ...]) -> str:
    """The module that torchtitan keeps whole; none for operators of the model itself."""
    first, _, rest = path.partition(".")
    item = rest.partition(".")[0]
    # Only a list has items by number and runs nothing itself.
    return f"{first}.{item}" if item.isdecimal() and first not in modules else first
