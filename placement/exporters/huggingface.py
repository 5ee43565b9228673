"""Hugging Face ``device_map``: module path -> device."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from placement.exporters import Exported, ExportError, lacks
from placement.exporters._modules import (
    Forward,
    is_constant,
    majority,
    require_torch_devices,
    served_format,
)
from placement.plan import Plan, ancestry, whole_modules
from placement.problem import Problem

INPUT = "(input)"  # the place of the model's inputs, which no module has as its path
FIRST = "cuda:0"  # where inputs are brought by most who do not ask the map
Places = frozenset[str]
_OTHER_NAMES = {  # files of which a map of the model of transformers cannot be told
    "gguf": "a GGUF file, whose tensors have names of their own: plan its config.json, or export "
    "with --to llama_cpp",
    "text_config": "the text model inside a larger one, whose other modules it does not know: plan "
    "its text_config as a config.json of its own",
}


@dataclass(frozen=True)
class Huggingface:
    """JSON object for ``accelerate.dispatch_model`` and ``from_pretrained(device_map=...)``.

    Format: ``accelerate.utils.check_device_map`` (accelerate 1.15): keys are paths of modules;
    every name of ``state_dict`` is covered by exactly one of them. A module that is mapped runs
    on its device: accelerate moves what it is called with there (``AlignDevicesHook``). What it
    returns stays. Operators that a split module runs itself (a residual addition) run where their
    inputs are, and fail where these are on several devices. accelerate runs devices one after
    another: no pipeline. Of a language model without its weights ``max_memory`` is written too
    (``.max_memory.json``; the keys of GPUs are numbers in Python).

    ``cpu`` beside a GPU means offloaded to accelerate, which then computes on the GPU; and all
    groups of cores are one device to torch. So a plan is on GPUs, or on one CPU device.
    """

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        form = served_format(plan)
        if form in _OTHER_NAMES:
            raise ExportError(f"the plan of {plan.graph.name!r} is of {_OTHER_NAMES[form]}")
        forward = Forward.of(plan, problem)
        if not forward.parameters:
            raise lacks(plan, "the model's parameters")
        require_torch_devices(plan, forward.device)
        model = Hooked(forward)
        merged = _one_host(forward)
        device, why = model.run(merged)
        if merged != list(forward.device):
            why = "torch has one CPU device, and accelerate computes on GPUs where there are some"
        if why or device != list(forward.device):
            unit, with_inputs = model.units()
            fixed = {}
            if with_inputs >= 0 and FIRST in merged:
                fixed = {with_inputs: FIRST}
            elif with_inputs >= 0:  # see ``Hooked.main``
                unit = [0 if u == with_inputs else u for u in unit]
            device = forward.nearest(unit, majority(unit, merged), set(merged), fixed)
            forward.require(
                device, "a device_map", why or "a split module runs it where its inputs are"
            )
            assert not why, f"units can be anywhere, but {why}"
        kinds = {d.name: d.kind for d in plan.cluster.devices}
        entries = model.covering(device)
        first = model.main(device, entries.values())
        inputs = {path: name for path, name in entries.items() if name == first}
        entries = inputs | entries  # accelerate takes the first device for the inputs
        here = {name: "cpu" if kinds[name] == "cpu" else name for name in entries.values()}
        text = json.dumps({path: here[name] for path, name in entries.items()}, indent=1)
        files = {"": text + "\n"}
        if form is not None:
            limits = {here[d]: plan.limits.memory_bytes[d] for d in entries.values()}
            room = {name.removeprefix("cuda:"): size for name, size in limits.items()}
            files[".max_memory.json"] = json.dumps(room, indent=1) + "\n"
        return Exported(
            files,
            "give the object in this file as device_map to from_pretrained, or to dispatch_model "
            f"with main_device={here[first]!r}",
        )


def _one_host(forward: Forward) -> list[str]:
    """``[F]`` devices without CPU devices beside others: the device with most operators instead."""
    host = {d.name for d in forward.plan.cluster.devices if d.kind == "cpu"}
    others = [name for name in forward.device if name not in host]
    most = Counter(others or forward.device).most_common(1)[0][0]
    return [most if name in host else name for name in forward.device]


class Hooked:
    """What accelerate does with the modules of a model, told from the graph.

    A *place* is where a tensor can be: with a module that is mapped, by the module's path, or with
    the model's inputs. Which device that is depends on the map.
    """

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.inside: dict[str, list[int]] = {}  # module -> operators that it and its parts run
        for i, path in enumerate(forward.module):
            for above in ancestry(path):
                self.inside.setdefault(above, []).append(i)
        self.owned: dict[str, list[int]] = {}  # module -> operators that read its own parameters
        self.owners: list[set[str]] = [set() for _ in forward.number]
        for name, readers in forward.parameters.items():
            if is_constant(name):
                continue
            owner = name.rpartition(".")[0]
            self.owned.setdefault(owner, []).extend(readers)
            for i in self.owned[owner]:
                self.owners[i].add(owner)

    def run(self, device: Sequence[str]) -> tuple[list[str], str]:
        """``([F] devices where operators run, why one cannot)`` where ``device [F]`` is wanted."""
        split = self._split(device)
        owners = {path: device[ops[0]] for path, ops in self.owned.items() if ops}
        known = owners | {path: device[ops[0]] for path, ops in self.inside.items()}
        known = {path: name for path, name in known.items() if path not in split}
        known[INPUT] = self.main(device, known.values())
        on = list(device)
        for i, places, together in self._places(range(len(device)), split):
            meet = sorted({known.get(place, "") for place in together or places})
            if "" in meet or (together and len(meet) > 1):
                name, path = self.forward.name[i], self.forward.module[i]
                if "" in meet:
                    return on, f"{name!r} of {path!r}: a module with parameters has one device"
                there = " and ".join(map(repr, meet))
                return on, f"operator {name!r} of module {path!r} would get tensors on {there}"
            here = sorted(known[p] for p in places)
            on[i] = device[i] if device[i] in here else here[0]
        return on, ""

    def main(self, device: Sequence[str], used: Collection[str]) -> str:
        """Where accelerate is told to put the inputs: with the first operator, if it can be.

        On ``cuda:0`` where a split module itself reads an input beside what its parts gave: many
        bring inputs there whatever the map says.
        """
        places = self._places(range(len(device)), self._split(device))
        wanted = FIRST if any(INPUT in together for _, _, together in places) else device[0]
        return next((name for name in (wanted, device[0], *used) if name in used), device[0])

    def units(self) -> tuple[list[int], int]:
        """``[F]`` the unit of each operator: a map can say any devices for them.

        And which of them has to be with the model's inputs, which it reads beside tensors of
        modules; -1: none.

        A module is whole unless it consists of units that run one after the other. A module that
        reads parameters of its own is whole: accelerate moves these with the module only.
        """
        split = {
            path  # called several times, and no place: what has no parameters needs none
            for path, ops in self.inside.items()
            if ops[-1] - ops[0] >= len(ops) and not any(path in ancestry(x) for x in self.owned)
        }
        for path in sorted(self.inside, key=lambda path: -len(ancestry(path))):
            if path and not self.owned.get(path):
                spans = self._groups(self.inside[path], split | {*ancestry(path)})[1]
                ends = sorted((min(span), max(span)) for span in spans.values())
                reach = accumulate((last for _, last in ends), max)
                if any(first > so_far for so_far, (first, _) in zip(reach, ends[1:], strict=False)):
                    split.add(path)
        split.add("")
        everything = range(len(self.forward.module))
        group, spans = self._groups(everything, split)
        first = {g: min(i for i in span if i >= 0) for g, span in spans.items()}
        number = {g: u for u, g in enumerate(sorted(first, key=first.__getitem__))}
        with_inputs = number.get(group.get(INPUT, ""), -1)
        number.setdefault(group.get(INPUT, ""), 0)  # see ``main``
        unit = [
            max(number.get(group[place], 0) for place in places)
            for _, places, _ in self._places(everything, split)
        ]
        return unit, with_inputs

    def covering(self, device: list[str]) -> dict[str, str]:
        """``whole_modules``, and an entry for every parameter that is in none of them."""
        entries = whole_modules(self.forward.module, device)
        for name, readers in self.forward.parameters.items():
            above = ancestry(name)
            if any(path in entries for path in above):
                continue
            unused = [path for path in above if path not in self.inside]  # the last is ``name``
            entries[unused[0]] = device[readers[0] if readers else -1]
        return entries

    def _split(self, device: Sequence[str]) -> set[str]:
        return {m for m, ops in self.inside.items() if len({device[i] for i in ops}) > 1}

    def _places(
        self, ops: Sequence[int], split: Collection[str]
    ) -> Iterator[tuple[int, Places, Places]]:
        """Where operators run, in the order they do: ``(operator, one of these, all of these)``.

        ``all of these`` are places that must be on one device, as tensors of them meet. What is
        made of nothing (a range) is with the model's inputs or with what was made last: the
        code says ``device=x.device``, and the graph does not know of which ``x``.

        Args:
            ops: operators; what others make comes in as the model's inputs do.
            split: modules that are not mapped as a whole.
        """
        inputs: Places = frozenset({INPUT})
        at: dict[int, Places] = {}
        before = inputs
        for i in ops:
            homes = {_whole(owner, split) or owner or INPUT for owner in self.owners[i]}
            meet = [frozenset({home}) for home in homes]
            home = _whole(self.forward.module[i], split)
            if home is not None:
                meet.append(frozenset({home}))
                at[i] = meet[-1]
            else:
                meet += [at.get(j, inputs) for j in self.forward.sources[i]]
                at[i] = frozenset(chain(*meet)) or before | inputs
            before = at[i]
            yield i, at[i], frozenset(chain(*meet)) if len(meet) > 1 else frozenset()

    def _groups(
        self, ops: Sequence[int], split: Collection[str]
    ) -> tuple[dict[str, str], dict[str, list[int]]]:
        """Places that must be on one device: ``(place -> group, group -> its operators)``.

        -1 is among the operators of a group that the model's inputs are in.
        """
        group: dict[str, str] = {}
        for _, places, together in self._places(ops, split):
            for place in places | together:
                group.setdefault(place, place)
            merged = {group[place] for place in together}
            if len(merged) > 1:
                group = {p: min(merged) if g in merged else g for p, g in group.items()}
        spans: dict[str, list[int]] = {}
        for i in ops:
            home = _whole(self.forward.module[i], split)
            if home is not None:
                spans.setdefault(group[home], []).append(i)
        if group.get(INPUT) in spans:
            spans[group[INPUT]].append(-1)
        return group, spans


def _whole(path: str, split: Collection[str]) -> str | None:
    """The outermost module around ``path``, or itself, that is not split."""
    return next((above for above in ancestry(path) if above not in split), None)
