"""``placement plan`` for a language model without its weights: what is asked, and what is said."""

from __future__ import annotations

import argparse
import gc
import shlex
from dataclasses import asdict, replace
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

from placement import cli

if TYPE_CHECKING:
    from placement.costs.serving import Serving
    from placement.costs.serving_bound import Bound
    from placement.importers.decoder import Decoder
    from placement.plan import Plan
    from placement.problem import Problem, Solution

_ONLY = ("context", "batch", "prompt", "split", "tensor_parallel", "experts")
_AS_MANY = "as many as is best"


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of what is served."""
    group = parser.add_argument_group(
        "a language model without weights (config.json, or a GGUF file's header)",
        "objectives: prefill, seconds for a prompt; decode, seconds for a token of each sequence "
        "when\nthe context is full; serve, a prompt and its answer until the context is full",
    )
    add = cli.adding(group)
    add("--context TOKENS", "longest sequence to make room for; needed", int)
    add("--batch B", "sequences at a time (1)", int)
    add(
        "--prompt TOKENS",
        "length of the prompt; default: half the context, for prefill all of it",
        int,
    )
    add(
        "--split",
        "place whole layers, or (tensors) feed-forwards and experts by themselves; default: "
        "layers; of models with experts, tensors",
        choices=("layers", "tensors"),
    )
    add(
        "--tensor-parallel K",
        "place layers on groups of alike devices that compute each of them together: of K, or "
        "of as many as is best",
        nargs="?",
        const=_AS_MANY,
    )
    add(
        "--experts COUNTS.csv",
        "how many tokens of a run chose each expert, columns layer, expert, count; default: "
        "all alike",
    )


def of(args: argparse.Namespace) -> Served | None:
    """What is to be served; None: the workload is no file of a language model.

    Raises:
        UsageError: it is none, but options or the objective are for one.
        FormatError: likewise, of a file.
    """
    from placement.costs.serving import Phase
    from placement.importers import is_decoder, load_decoder

    if cli.looks_like_file(args.workload) and is_decoder(args.workload):
        return Served(args)
    given = [name for name in _ONLY if getattr(args, name) is not None]
    options = [f"--{name.replace('_', '-')}" for name in given]
    if args.objective in list(Phase):
        options.append(f"--objective {args.objective}")
    if options and cli.is_file(args.workload):
        load_decoder(args.workload)  # says why it is none
    if options:
        raise cli.UsageError(
            f"{', '.join(options)} is for language models without weights, a config.json or a GGUF "
            f"file; {args.workload!r} is none"
        )
    return None


class Served:
    """A language model, and how it is to be served; both are known once it is loaded.

    Attributes:
        decoder: the model, its hot experts apart where that was asked for.
        serving: which phase, of how long a context, for how many sequences.
    """

    decoder: Decoder
    serving: Serving

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def load(self) -> Problem:
        """The problem.

        Raises:
            UsageError: an option that is for other workloads, or none where one is needed.
            FormatError: the file is not that of a model that is known.
            ValueError: what ``serving_problem`` and ``best_groups`` raise.
        """
        from placement.costs.groups import best_groups
        from placement.costs.hot_experts import with_hot_experts
        from placement.costs.serving import min_batch
        from placement.planners import load

        size = self._group_size()
        self.decoder, self.serving = _asked(self._args)
        self._cluster = cli.cluster_of(self._args.cluster)
        if self._args.tensor_parallel is not None:
            return best_groups(self.decoder, self._cluster, self.serving, load("layer_dp"), size)
        self.decoder, problem = with_hot_experts(self.decoder, self._cluster, self.serving)
        profile = problem.profile
        least = {"offload_min_batch": min_batch(self.decoder, self._cluster)}
        return replace(problem, profile=replace(profile, provenance=profile.provenance | least))

    def _group_size(self) -> int | None:
        """Of ``--tensor-parallel``; None: any. Raises: UsageError, it is no number."""
        size = self._args.tensor_parallel
        if size in (None, _AS_MANY):
            return None
        if not size.isdecimal():
            raise cli.UsageError(
                f"--tensor-parallel {size}: give the number of devices of a group, or nothing "
                "behind it"
            )
        return int(size)

    def longest(self) -> int:
        """The longest context that fits; in groups, where the largest of them hold it."""
        from placement.costs.groups import group_problem, groupings
        from placement.costs.serving import largest_context, serving_problem

        decoder, cluster = self.decoder, self._cluster
        if self._args.tensor_parallel is None:
            make = partial(serving_problem, decoder, cluster)
        else:
            groups = groupings(decoder, cluster, self._group_size())[0]
            make = partial(group_problem, decoder, cluster, groups=groups)
        return largest_context(make, self.serving, fits)

    def answer(self, problem: Problem, solution: Solution) -> dict[str, Any]:
        """What machines read besides what every plan has; the keys are a contract."""
        from placement.costs.serving import interval, memory, terms

        facts: dict[str, Any] = {"memory": memory(problem, solution.placement)}
        if not isfinite(solution.value_s):
            return facts | {"largest_context": self.longest()}
        parts = terms(self.decoder, problem.cluster, self.serving, solution.placement)
        bounds = {x: asdict(y) for x, y in self._bounds(problem, solution).items()}
        facts |= {"bounds": bounds} | ({"hot_experts": hot} if (hot := self.hot_experts()) else {})
        weights = dict(zip(("prefill", "decode"), self.serving.weights, strict=True))
        factors = interval(self.decoder, problem.cluster, solution.placement)
        within = {f"{x}_s": [factor * parts[f"{x}_s"] for factor in y] for x, y in factors.items()}
        rate = [self.serving.batch / x for x in (parts["decode_s"], *reversed(within["decode_s"]))]
        rates = dict(zip(("predicted", "low", "high"), rate, strict=True))
        return facts | {**parts, "weights": weights, "interval": within, "tokens_per_s": rates}

    def why_not(self, problem: Problem) -> str:
        """What is needed, what is there, and which context fits."""
        serving, graph, held = self.serving, problem.graph, problem.profile.provenance
        cache_bytes = int(graph.param_bytes[held["kv_cache"]].sum())
        total, there = int(graph.param_bytes.sum()), sum(problem.memory_bytes.tolist())
        needs = (
            f"a context of {serving.context:,} tokens x {serving.batch} needs {total:,} bytes (of "
            f"which {cache_bytes:,} are cache), the devices have {there:,} together"
        )
        if fits(problem):
            return f"{needs}; another planner finds a split that fits: --planner layer_dp"
        largest = self.longest()
        if not largest:
            return f"{needs}; no context fits"
        return (
            f"{needs}; the largest context with which layers fit one device after another is "
            f"{largest} tokens: --context {largest}"
        )

    def table(self, problem: Problem, solution: Solution) -> None:
        """Show what the devices hold, how fast that is, and how sure."""
        from placement.costs.serving import interval, memory, terms
        from placement.tools.files import some

        rows = [
            [name, *(cli.byte_size(float(x)) for x in held.values())]
            for name, held in memory(problem, solution.placement).items()
        ]
        header = ["device", "weights", "KV cache", "buffers", "needed", "there"]
        cli.print_table("memory", header, rows)
        used = {problem.cluster.device_names[d] for d in solution.placement}
        if idle := [name for name in problem.cluster.device_names if name not in used]:
            more = "--tensor-parallel, " if self._args.tensor_parallel is None else ""
            print(
                f"{len(idle)} of {problem.num_devices} devices are idle ({some(idle)}): a batch is "
                "on one device at a time, so that one more device adds transfers and no speed "
                "where the others hold everything. To use them: a second copy of the model, "
                "planned for a "
                f"cluster of these alone, {more}or a larger --batch or --context"
            )
        decoder, serving = self.decoder, self.serving
        if hot := self.hot_experts():
            sizes = sorted(map(len, hot.values()))
            print(
                f"hot experts stay with their layer, the others (#1) are apart: {sizes[0]} to "
                f"{sizes[-1]} of a layer, {sum(sizes)} in all; which ones: --json, hot_experts"
            )
        seconds = terms(decoder, problem.cluster, serving, solution.placement)
        for phase, bound in self._bounds(problem, solution).items():
            rest = {"operators below the devices' rates": bound.slow_s,
                    "devices that wait, or slower memory than there is": bound.turns_s,
                    "handing on": bound.handing_s}  # fmt: skip
            listed = sorted(rest.items(), key=lambda pair: -pair[1])
            print(
                f"{phase}: {bound.share:.0%} of what this machine can do, "
                f"{cli.seconds(bound.least_s)} with all devices and links at their full rates; "
                "the rest is "
                + ", ".join(f"{cli.seconds(x)} {name}" for name, x in listed if x > 0)
            )
        factors = interval(decoder, problem.cluster, solution.placement)
        rate, (fast, slow) = serving.batch / seconds["decode_s"], factors["decode"]
        prompt_s = seconds["prefill_s"]
        early_s, late_s = (cli.seconds(prompt_s * factor) for factor in factors["prefill"])
        print(
            f"decode: {rate:.1f} tokens/s at a context of {serving.context} ({rate / slow:.1f} to "
            f"{rate / fast:.1f}); prefill: {cli.seconds(prompt_s)} for {serving.batch} x "
            f"{serving.tokens} tokens ({early_s} to {late_s}); in brackets 90 % intervals"
        )

    def _bounds(self, problem: Problem, solution: Solution) -> dict[str, Bound]:
        """Of both phases."""
        from placement.costs.serving import Phase
        from placement.costs.serving_bound import bound

        asked = self.decoder, problem.cluster, self.serving, solution.placement
        return {str(phase): bound(*asked, phase) for phase in (Phase.PREFILL, Phase.DECODE)}

    def hot_experts(self) -> dict[int, list[int]]:
        """By layer, the experts that are with the layer where others are apart; empty: none are."""
        return {p.layer: list(p.experts) for p in self.decoder.parts if p.name.endswith("#0")}

    def check(self, plan: Plan) -> str:
        """The command that measures what is predicted; empty where no program runs such a plan."""
        from placement import exporters

        try:
            exported = exporters.load(self.runs_in(plan))(plan)
        except exporters.ExportError:
            return ""
        is_gguf = plan.provenance.profile.get("format") == "gguf"
        model = shlex.quote(self._args.workload) if is_gguf else "MODEL"
        return exported.check.replace("MODEL", model)

    def runs_in(self, plan: Plan) -> str:
        """The exporter for the program that is predicted."""
        kinds = {d.name: d.kind for d in plan.cluster.devices}
        is_gguf = plan.provenance.profile.get("format") == "gguf"
        mixed = len({kinds[d] == "cpu" for d in plan.assignment.values()}) > 1
        return "llama_cpp" if is_gguf or mixed else "vllm"


def fits(problem: Problem) -> bool:
    """Whether layers one after another fit, in any order of the devices."""
    from placement.planners import load

    return isfinite(load("layer_dp")(problem).value_s)


def _asked(args: argparse.Namespace) -> tuple[Decoder, Serving]:
    """The model, and what is served."""
    from placement.costs.serving import Phase, Serving
    from placement.importers import load_decoder
    from placement.importers.routing import with_counts
    from placement.tools.named import meant

    others = ("profile", "predict", "optimizer", "microbatches", "in_flight", "second_j", "devices",
              "bandwidth", "memory", "flops", "memory_bandwidth", "dim", "max_phases",
              "pieces")  # fmt: skip
    wrong = [f"--{name.replace('_', '-')}" for name in others if getattr(args, name) is not None]
    if args.mode not in (None, "inference"):
        wrong.append(f"--mode {args.mode}")
    if wrong:
        raise cli.UsageError(f"{args.workload}: {', '.join(wrong)} is not for language models")
    objective = args.objective or Phase.DECODE
    if objective not in list(Phase):
        near = meant(objective, map(str, Phase)) or ";"
        raise cli.UsageError(
            f"--objective {objective} is not for language models{near} "
            f"use one of {', '.join(Phase)}"
        )
    if args.context is None:
        raise cli.UsageError(f"{args.workload}: --context TOKENS is needed, e.g. --context 8192")
    batch = 1 if args.batch is None else args.batch
    decoder = load_decoder(args.workload)
    if args.experts is not None:
        decoder = with_counts(decoder, args.experts)
    gc.freeze()  # what its libraries made when they were imported stays: it is not looked at again
    has_experts = "experts" in decoder.class_bytes()
    whole = args.split == "layers" or (args.split is None and not has_experts)
    return decoder, Serving(Phase(objective), args.context, batch, args.prompt, whole)
