"""``torch.distributed.pipelining``: split points, and a script that runs the pipeline."""

from __future__ import annotations

import json
from dataclasses import dataclass

from placement.exporters import Exported
from placement.exporters._modules import Forward, described, require_torch_devices, script
from placement.plan import Plan, ancestry
from placement.problem import Problem
from placement.tools.files import some


@dataclass(frozen=True)
class TorchPipelining:
    """A script for ``torchrun``, and beside it the split points and the schedule as JSON.

    Format: ``torch.distributed.pipelining.pipeline(module, args, split_spec={path:
    SplitPoint.BEGINNING})`` of torch 2.13: a stage begins where a module begins that runs once,
    only the first stage reads the model's inputs, and only the last one gives its outputs.
    Stage ``i`` is on rank ``i`` modulo the number of ranks. The script takes the module as
    ``package.module:function``, checks that the pipeline computes what the plain module does, and
    prints seconds per micro-batch. It reads the plan's names from the JSON; none is code.
    A parameter of several stages is replicated, and nobody adds its gradients up
    (``Pipe.__init__`` in ``torch/distributed/pipelining/_IR.py``): see the note of such a plan.

    Attributes:
        schedule: a class of ``torch.distributed.pipelining`` without ``Schedule``; None: GPipe
            (LoopedBFS if devices take several turns), in training 1F1B (Interleaved1F1B) where
            torch runs so many micro-batches that way.
        once: every device has one stage. Torch's schedules of several turns send to the next stage
            only, which excludes connections past a stage.
    """

    schedule: str | None = None
    once: bool = False

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        forward = Forward.of(plan, problem)
        require_torch_devices(plan, forward.device, as_ranks=True)
        last_input, leaves = _ends(forward)
        begins = {i: x for i, x in _beginnings(forward.module).items() if last_input < i <= leaves}
        starts = [0, *sorted(begins)]
        unit = [sum(s <= i for s in starts) - 1 for i in range(len(forward.module))]
        labels = [f"what runs from {begins.get(s, '')!r} to the next module" for s in starts]
        labels[0] += f" behind {forward.name[last_input]!r}, which reads an input,"
        labels[-1] += f" ({forward.name[leaves]!r} makes an output)"
        parts = forward.chain(
            unit, labels, "torch.distributed.pipelining", 1 if self.once else None
        )
        ranks = list(dict.fromkeys(part.device for part in parts))
        many, count = len(parts) > len(ranks), plan.num_microbatches
        # Fewer than stages, or unequal rounds of one per rank, are refused by torch's 1F1B.
        enough = count % max(1, count // len(ranks)) == 0 if many else count >= len(parts)
        alternates = plan.graph.mode == "training" and enough
        chosen = ("1F1B", "Interleaved1F1B") if alternates else ("GPipe", "LoopedBFS")
        data = {
            "split_points": [begins[starts[part.first]] for part in parts[1:]],
            "ranks": described(plan, ranks),
            "schedule": self.schedule or chosen[many],
            "num_microbatches": count,
            "mode": plan.graph.mode,
            "workload": plan.graph.workload,
        }
        note = f"run: torchrun --nproc-per-node {len(ranks)} FILE package.module:function"
        stage = [i for i, part in enumerate(parts) for _ in range(part.first, part.last + 1)]
        if tied := forward.shared([stage[u] for u in unit]):
            note += f"; each of its stages has a copy of {some(list(tied))}"
            if plan.graph.mode == "training":
                note += ": add the gradients of the copies up before an optimizer's step"
        files = {"": script("_torchrun.py"), ".json": json.dumps(data, indent=1) + "\n"}
        return Exported(files, note)


def _ends(forward: Forward) -> tuple[int, int]:
    """The last operator that reads an input of the model, the first that makes an output.

    Torch gives the inputs to the first stage, and takes the outputs of the last.
    """
    last_input = max((i for i, read in enumerate(forward.sources) if -1 in read), default=0)
    graph, last = forward.plan.graph, len(forward.number) - 1
    if graph.mode == "training":  # there the loss is the output
        return last_input, last
    return last_input, min(
        (i for i, n in enumerate(forward.number) if n in graph.outputs), default=last
    )


def _beginnings(modules: tuple[str, ...]) -> dict[int, str]:
    """First operator -> path of the innermost module that begins there, and runs only once.

    Innermost, because an outer one may be a list of modules, which never runs itself.
    """
    where: dict[str, list[int]] = {}
    for i, path in enumerate(modules):
        for above in ancestry(path)[1:]:
            where.setdefault(above, []).append(i)
    by_op: dict[int, str] = {}
    for path in sorted(where, key=lambda x: -x.count(".")):
        first, last = where[path][0], where[path][-1]
        if first > 0 and last - first + 1 == len(where[path]):
            by_op.setdefault(first, path)
    return by_op
