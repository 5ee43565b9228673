"""What programs that place whole modules can say: units of operators, chains of stages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from placement.exporters import ExportError, Inexpressible, lacks, require_one_phase, require_whole
from placement.plan import Plan
from placement.problem import Problem
from placement.tools.files import some

K = TypeVar("K")


@dataclass(frozen=True)
class Part:
    """Units ``first`` to ``last`` (both included) on one device."""

    device: str
    first: int
    last: int


@dataclass(frozen=True)
class Forward:
    """The forward operators of a plan, ``F`` of them in the order they are numbered.

    Attributes:
        plan: where they come from.
        problem: what its costs are, if that is known.
        number: ``[F]`` operator numbers in the plan.
        name, module, device: ``[F]`` names, module paths, and devices of the plan.
    """

    plan: Plan
    problem: Problem | None
    number: tuple[int, ...]
    name: tuple[str, ...]
    module: tuple[str, ...]
    device: tuple[str, ...]

    @classmethod
    def of(cls, plan: Plan, problem: Problem | None = None, *, groups: bool = False) -> Forward:
        """From a plan, and the problem that it is for; ``groups``: the format knows some.

        Raises:
            ExportError: the plan does not know the modules of its operators, or has phases, pieces,
                groups of devices, or weights that stay in host memory.
        """
        require_one_phase(plan)
        require_whole(plan)
        used = [d for d in plan.cluster.devices if d.name in plan.devices_in_use]
        if streaming := next((d.name for d in used if d.streams), None):
            raise ExportError(
                f"{streaming!r} computes with weights that stay in host memory, which this format "
                "cannot say: export with --to csv, or plan for devices that do not stream"
            )
        group = next((d.name for d in plan.cluster.devices if d.members and not groups), None)
        if group in plan.devices_in_use:
            raise ExportError(
                f"{group!r} is a group of devices that compute each layer together, which this "
                "format cannot say: export with --to vllm, megatron or torchtitan, or plan without "
                "--tensor-parallel"
            )
        if not any(plan.graph.modules):
            if plan.graph.modules and plan.graph.input_spec is not None:  # of a captured model
                raise ExportError(
                    f"no operator of {plan.graph.name!r} is in a submodule, and whole modules are "
                    "all that can be placed there: make parts of its forward modules of their own "
                    "(torch.nn.Module) and plan again, or export with --to csv"
                )
            raise lacks(plan, "to which modules its operators belong")
        backward = set(plan.graph.backward)
        number = tuple(i for i in range(plan.graph.num_ops) if i not in backward)
        names, devices = list(plan.assignment), list(plan.assignment.values())
        return cls(
            plan,
            problem,
            number,
            tuple(names[i] for i in number),
            tuple(plan.graph.modules[i] for i in number),
            tuple(devices[i] for i in number),
        )

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """``[F]`` which of the forward operators each one reads from; -1: the model's inputs.

        Raises:
            ExportError: the plan does not know.
        """
        if not self.plan.graph.sources:
            raise lacks(self.plan, "which operators read from which")
        at = {-1: -1} | {n: i for i, n in enumerate(self.number)}
        read = self.plan.graph.sources
        return tuple(tuple(at[s] for s in read[n] if s in at) for n in self.number)

    @cached_property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Which of the forward operators read each parameter or buffer; tied ones have one name.

        Of a plan from a ``config.json`` or GGUF every module reads parameters of its own, and a
        tied head those of the embedding. Empty: the plan does not know.
        """
        at = {n: i for i, n in enumerate(self.number)}
        if served_format(self.plan) is None:
            known = self.plan.graph.parameters.items()
            return {name: tuple(at[n] for n in ops if n in at) for name, ops in known}
        readers: dict[str, list[int]] = {}
        for i, path in enumerate(self.module):
            readers.setdefault(f"{path}.weight", []).append(i)
        if self.plan.provenance.profile.get("tied") is True:
            readers[f"{self.module[0]}.weight"] += readers.pop(f"{self.module[-1]}.weight")
        return {name: tuple(ops) for name, ops in readers.items()}

    def shared(self, unit: Sequence[int]) -> dict[str, list[int]]:
        """Parameters that several of the units ``[F]`` read, with these units, ascending."""
        units = {name: {unit[i] for i in ops} - {-1} for name, ops in self.parameters.items()}
        return {
            name: sorted(some)
            for name, some in units.items()
            if len(some) > 1 and not is_constant(name)
        }

    def tied(self, unit: Sequence[int]) -> bool:
        """Whether the last of the units ``[F]`` (the head) reads a parameter of unit 0."""
        return any({0, max(unit)} <= {*units} for units in self.shared(unit).values())

    @cached_property
    def twin(self) -> tuple[int, ...]:
        """``[N]`` the forward operator that each operator of the plan goes with.

        A backward operator goes with its forward, or else with the last of its module; -1: with
        none (an index of the last of all).
        """
        names, modules = list(self.plan.assignment), self.plan.graph.modules
        at = {name: i for i, name in enumerate(self.name)}
        last = {path: i for i, path in enumerate(self.module)}
        for n in self.plan.graph.backward:
            forward = names[n].removesuffix("_backward").removesuffix("_weight")
            at[names[n]] = at.get(forward, last.get(modules[n], -1))
        return tuple(at[name] for name in names)

    def whole(self, device: Sequence[str]) -> dict[str, str]:
        """Operator -> device, backward operators where the forward of their module is."""
        planned = self.plan.assignment.items()
        pairs = zip(planned, self.twin, strict=True)
        return {name: device[i] if i >= 0 else here for (name, here), i in pairs}

    def nearest(
        self,
        unit: Sequence[int],
        on: Mapping[int, str],
        devices: Iterable[str],
        fixed: Mapping[int, str] | None = None,
    ) -> list[str]:
        """``[F]`` devices that keep units whole: ``on``, or what costs less if costs are known.

        Args:
            unit: ``[F]`` unit of each operator, numbered in the order they run.
            on: unit -> device, so that few operators move.
            devices: those that may be used.
            fixed: unit -> its device, of units that have no choice.

        Raises:
            PlanMismatch: the problem is not that of the plan.
        """
        fixed = fixed or {}
        few = [{**on, **fixed}[u] for u in unit]
        if self.problem is None:
            return few
        from placement.nearest import best_whole

        known = self.plan.placement(self.problem.graph, self.problem.cluster)
        index = self.problem.cluster.index
        known[:] = [index(few[i]) for i in self.twin]
        allowed = {index(name) for name in devices}
        numbered = {u: index(name) for u, name in fixed.items()}
        units = [unit[i] for i in self.twin]
        best = best_whole(self.problem, units, known, allowed, numbered)
        return [self.problem.cluster.device_names[best[n]] for n in self.number]

    def require(self, device: Sequence[str], consumer: str, why: str = "") -> None:
        """Check that the plan is what the consumer will do with forward operators on ``device``.

        Raises:
            Inexpressible: it is not; the message names the first operator that would move.
        """
        planned, nearest = self.plan.assignment, self.whole(device)
        moved = [name for name in planned if planned[name] != nearest[name]]
        if not moved:
            return
        path = self.plan.graph.modules[list(planned).index(moved[0])]
        more = f", and {len(moved) - 1} more would move" if len(moved) > 1 else ""
        raise Inexpressible(
            f"{consumer} cannot express this plan: {why + '; ' if why else ''}operator "
            f"{moved[0]!r} of module {path!r} is planned on {planned[moved[0]]!r}, it would run on "
            f"{nearest[moved[0]]!r}{more}. --nearest exports the nearest plan it can express",
            nearest,
        )

    def chain(
        self,
        unit: Sequence[int],
        labels: Sequence[str],
        consumer: str,
        max_turns: int | None = None,
    ) -> list[Part]:
        """The units as a pipeline: consecutive ones on one device, devices in equal turns.

        Args:
            unit: ``[F]`` unit of each operator, 0 to U-1, or -1: it belongs to no unit and runs
                with the unit before it, or with the one behind it, whichever the plan says.
            labels: ``[U]`` what units are called in messages.
            max_turns: how often a device may come; None: any number.

        Raises:
            Inexpressible: a unit is on several devices, or devices do not take equal turns.
                ``nearest`` then has a run of units for each device: of least cost where costs
                are known, else in the order of the plan with few operators moved.
        """
        unit = self.joined(unit)
        count: list[Counter[str]] = [Counter() for _ in labels]
        for u, device in zip(unit, self.device, strict=True):
            count[u][device] += 1
        split = [u for u, devices in enumerate(count) if len(devices) > 1]
        on = [devices.most_common(1)[0][0] for devices in count]
        parts = _parts(on)
        turns = [p.device for p in parts]
        round_ = list(dict.fromkeys(turns))
        times = len(turns) // len(round_)
        fits = turns == round_ * times and times <= (max_turns or times)
        if split or not fits:
            why = (
                f"it keeps {labels[split[0]]} on one device"
                if split
                else f"its devices come in the order {some(turns)}"
            )
            few = _nearest(count, self._by_position(unit))
            self.require(self.nearest(unit, dict(enumerate(few)), self.device), consumer, why)
        self.require([on[u] for u in unit], consumer)
        return _parts(on)

    def joined(self, unit: Sequence[int]) -> list[int]:
        """``unit`` with operators of no unit in a neighbouring one."""
        joined, n = list(unit), len(unit)
        real = [i for i in range(n) if unit[i] >= 0]
        if not real:
            raise ExportError(f"no operator of {self.plan.graph.name!r} belongs to a unit")
        after = n
        behind = [0] * n
        for i in reversed(range(n)):
            after = i if unit[i] >= 0 else after
            behind[i] = unit[after] if after < n else unit[real[-1]]
        for i in range(n):
            if unit[i] < 0:
                stays = i > 0 and (self.device[i] == self.device[i - 1] or i > real[-1])
                joined[i] = joined[i - 1] if stays else behind[i]
        return joined

    def _by_position(self, unit: Sequence[int]) -> list[str]:
        """The devices in use, by the mean unit of their operators."""
        where: dict[str, list[int]] = {}
        for u, device in zip(unit, self.device, strict=True):
            where.setdefault(device, []).append(u)
        return sorted(where, key=lambda d: sum(where[d]) / len(where[d]))


def actions(forward: Forward, unit: Sequence[int], parts: Sequence[Part]) -> list[list[str]]:
    """The plan's order as actions of ``torch.distributed.pipelining``: a row per rank.

    ``2F0`` is the forward of stage 2 for micro-batch 0; ``B`` its backward, or ``I`` and ``W``
    for gradients of inputs and of weights where the plan runs them apart.

    Raises:
        Inexpressible: an action is left half-way; ``nearest`` is the assignment without order.
    """
    plan, names = forward.plan, list(forward.plan.assignment)
    stage_of = [i for i, part in enumerate(parts) for _ in range(part.first, part.last + 1)]
    joined = forward.joined(unit)
    stage = {name: stage_of[joined[i]] for name, i in zip(names, forward.twin, strict=True)}
    split = any(names[i].endswith("_weight_backward") for i in plan.graph.backward)
    kind = dict.fromkeys(forward.name, "F")
    for i in plan.graph.backward:
        kind[names[i]] = "B" if not split else "W" if "_weight_" in names[i] else "I"
    rows = []
    for device in dict.fromkeys(part.device for part in parts):
        done = [(stage[op], kind[op], batch) for op, batch in (plan.order or {})[device]]
        at: dict[tuple[int, int], list[int]] = {}
        for i, (s, what, batch) in enumerate(done):
            if what != "F":
                at.setdefault((s, batch), []).append(i)
        whole = {x for x, where in at.items() if where[-1] - where[0] < len(where)}
        named = [(s, "B" if x != "F" and (s, m) in whole else x, m) for s, x, m in done]
        row = [f"{s}{what}{batch}" for (s, what, batch), _ in groupby(named)]
        twice = [action for action, times in Counter(row).items() if times > 1]
        if twice:
            raise Inexpressible(
                f"the plan's order leaves {twice[0]} on {device!r} half-way and comes back to it, "
                "a schedule of stages cannot. --nearest leaves the order to the schedule",
                plan.assignment,
            )
        rows.append(row)
    return rows


def layer_units(forward: Forward, layers: str | None) -> tuple[str, list[int], int]:
    """The repeated layers of a model: ``(path of their list, unit [F], number of layers L)``.

    Units are 0 for what runs before the first layer, 1 to L for the layers, L+1 for what runs
    behind the last one, -1 between.

    Args:
        layers: path of the list, e.g. ``transformer.h``; None finds the list with most operators.

    Raises:
        ExportError: there is no such list, or its layers do not run in order.
    """
    lists: dict[str, Counter[int]] = {}
    for path in forward.module:
        parts = path.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                lists.setdefault(".".join(parts[:i]), Counter())[int(part)] += 1
    lists = {k: v for k, v in lists.items() if sorted(v) == list(range(len(v))) and len(v) > 1}
    longest = max(lists, key=lambda k: lists[k].total(), default="")
    chosen = longest if layers is None else layers
    if chosen not in lists:
        wanted = "" if layers is None else f" {layers!r}"
        others = "torch_pipelining and huggingface place any modules"
        if lists:
            others = f"there are {some(sorted(lists))}: layers=NAME"
        raise ExportError(f"{forward.plan.graph.name!r} has no list of layers{wanted}; {others}")
    above = chosen.split(".") if chosen else []

    def layer(path: str) -> int | None:
        """Number of the layer that a module is in; a list may have other modules too."""
        words = path.split(".")
        part = words[len(above)] if words[: len(above)] == above and words != above else ""
        return int(part) if part.isdecimal() else None

    inside = [layer(path) for path in forward.module]
    runs = [(i, x) for i, x in enumerate(inside) if x is not None]
    if [x for _, x in runs] != sorted(x for _, x in runs):
        raise ExportError(f"the layers of {chosen!r} do not run one after the other")
    first, last, num_layers = runs[0][0], runs[-1][0], len(lists[chosen])
    unit = [
        x + 1 if x is not None else 0 if i < first else num_layers + 1 if i > last else -1
        for i, x in enumerate(inside)
    ]
    return chosen, unit, num_layers


def layer_chain(
    forward: Forward,
    layers: tuple[str, list[int], int],
    consumer: str,
    max_turns: int | None = None,
) -> tuple[list[Part], range]:
    """``(parts, units)``: the chain of what runs before, in and behind the repeated layers.

    Parts count from the first of ``units``, which are those of ``layer_units`` that the model has:
    it may begin or end with a layer.

    Raises:
        ExportError: as ``Forward.chain``.
    """
    path, unit, num_layers = layers
    units = range(min(u for u in unit if u >= 0), max(unit) + 1)
    labels = [
        "what runs before the layers",
        *(f"layer {i} of {path!r}" for i in range(num_layers)),
        "what runs behind the layers",
    ][units.start : units.stop]
    shifted = [u - units.start if u >= 0 else -1 for u in unit]
    return forward.chain(shifted, labels, consumer, max_turns), units


def decoder_units(
    forward: Forward, layers: str | None, consumer: str
) -> tuple[str, list[int], int]:
    """``layer_units`` of a language model, whose layers a program knows as a decoder's.

    A decoder looks tokens up before its first layer. Its layers have attention, or a convolution of
    one dimension (Mamba), or have at least the same operators. Those of an encoder are not a
    decoder's.

    Raises:
        ExportError: it is none; also as ``layer_units``.
    """
    path, unit, num_layers = layer_units(forward, layers)
    if served_format(forward.plan) is not None:
        return path, unit, num_layers
    kind = [re.sub(r"(_\d+)?$", "", name) for name in forward.name]
    layer: list[set[str]] = [set() for _ in range(num_layers)]
    for k, u in zip(kind, unit, strict=True):
        if 1 <= u <= num_layers:
            layer[u - 1].add(k)
    inside = set().union(*layer)
    alike = all(kinds == layer[0] for kinds in layer)
    reads = {k for k, u in zip(kind, unit, strict=True) if u <= 1}
    encoders = sorted({w for m in forward.module for w in m.split(".") if w.startswith("encoder")})
    why = ""
    if not any(k.endswith("embedding") for k in reads):
        why = "nothing looks tokens up before them"
    elif not (alike or any("attention" in k or k.endswith(("softmax", "conv1d")) for k in inside)):
        why = "they have no attention"
    elif any(k.startswith("conv") and "1d" not in k for k in inside):
        why = "they are convolutions"
    elif encoders:
        why = f"the model has an encoder ({encoders[0]!r})"
    if why:
        raise ExportError(
            f"{consumer} is for language models with decoder layers, and those of {path!r} in "
            f"{forward.plan.graph.name!r} are none: {why}. Export with --to torch_pipelining or "
            "huggingface, which place any modules; of a language model plan the config.json"
        )
    return path, unit, num_layers


def is_constant(name: str) -> bool:
    """Whether a name among the parameters is of a constant in the model's code."""
    return re.search(r"(^|\.)_?lifted_tensor_", name) is not None


def served_format(plan: Plan) -> str | None:
    """What file a plan of a language model without its weights is from; None of other plans.

    ``config.json``, its ``text_config`` where that is a part of a larger model, or ``gguf``.

    Operators of layers then end in ``.attention``, ``.router``, ``.feed_forward`` or ``.experts``.
    """
    kind = plan.provenance.profile.get("format")
    return kind if kind in ("config.json", "text_config", "gguf") else None


def gpu_number(name: str) -> int | None:
    """1 of ``cuda:1``; None of any other name: names are free, and what is exported may be run."""
    match = re.fullmatch(r"cuda:([0-9]{1,4})", name)
    return int(match[1]) if match else None


def members_of(plan: Plan, parts: Sequence[Part], consumer: str) -> list[tuple[str, ...]]:
    """Of each part the devices that compute its layers together; one, where it is no group.

    Raises:
        ExportError: they are not equally many.
    """
    named = {d.name: d.members or (d.name,) for d in plan.cluster.devices}
    members = [named[part.device] for part in parts]
    for part, own in zip(parts, members, strict=True):
        if len(own) != len(members[0]):
            raise ExportError(
                f"{consumer} has groups of one size: {parts[0].device!r} has {len(members[0])} "
                f"devices, and {part.device!r} has {len(own)}. Plan with groups of as many: "
                f"--tensor-parallel {max(map(len, members))}"
            )
    return members


def require_torch_devices(plan: Plan, used: Iterable[str], *, as_ranks: bool = False) -> None:
    """Check that torch knows the devices in use; ``as_ranks``: and sends tensors between them.

    Raises:
        ExportError: one is neither CPU cores nor a GPU ``cuda:N``; or ranks are of both kinds.
    """
    kinds = {d.name: d.kind for d in plan.cluster.devices}
    each = {kinds[name]: name for name in used}
    if as_ranks and {"cpu", "cuda"} <= each.keys():
        raise ExportError(
            f"ranks of torch.distributed send over Gloo (CPU cores, {each['cpu']!r}) or over NCCL "
            f"(GPUs, {each['cuda']!r}), and not from one to the other: plan for devices of one "
            "kind, or export with --to huggingface"
        )
    for name in sorted(set(used)):
        if kinds[name] != "cpu" and (kinds[name] != "cuda" or gpu_number(name) is None):
            raise ExportError(
                f"torch has no device {name[:60]!r} of kind {kinds[name][:60]!r}: devices are CPU "
                "cores (kind cpu) or GPUs (kind cuda) called cuda:0, cuda:1, ..."
            )


def described(plan: Plan, ranks: Iterable[str]) -> list[dict[str, Any]]:
    """What a script for ``torchrun`` knows of the devices of its ranks."""
    cluster = {d.name: d for d in plan.cluster.devices}
    known = {"name", "kind", "cores", "threads"}
    return [cluster[name].model_dump(include=known) for name in ranks]


def script(name: str) -> str:
    """The text of a script of this folder, with what it has in common with the others in it."""
    shared, own = (
        Path(__file__).with_name(file).read_text(encoding="utf-8") for file in ("_ranks.py", name)
    )
    body = shared.partition("from __future__ import annotations\n\n")[2]
    return re.sub(r"from placement\.exporters\._ranks import .*\n", lambda _: body, own)


def majority(keys: Sequence[K], devices: Sequence[str]) -> dict[K, str]:
    """Of operators with equal ``keys`` the device that most are on; both ``[F]``."""
    count: dict[K, Counter[str]] = {}
    for key, device in zip(keys, devices, strict=True):
        count.setdefault(key, Counter())[device] += 1
    return {key: each.most_common(1)[0][0] for key, each in count.items()}


def _parts(on: Sequence[str]) -> list[Part]:
    parts, start = [], 0
    for device, group in groupby(on):
        size = len(list(group))
        parts.append(Part(device, start, start + size - 1))
        start += size
    return parts


def _nearest(count: Sequence[Counter[str]], order: Sequence[str]) -> list[str]:
    """``[U]`` devices in the given order, a run of units each, so that fewest operators move.

    Dynamic program over units: the best way to end the units so far on device ``j``.
    """
    cost = [0] * len(order)
    choices = []
    for devices in count:
        back = [min(range(j + 1), key=lambda k: (cost[k], -k)) for j in range(len(order))]
        cost = [cost[k] + devices.total() - devices[order[j]] for j, k in enumerate(back)]
        choices.append(back)
    j = min(range(len(order)), key=lambda k: cost[k])
    on = []
    for back in reversed(choices):
        on.append(order[j])
        j = back[j]
    return on[::-1]
