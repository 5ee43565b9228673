"""A decoder that serves, as a problem: prompts, tokens, and what they keep in memory.

Nothing runs: operations and bytes are those of the decoder's tensors, and seconds those of a rule
that is fitted to what programs were measured to take (``placement.costs.runtimes``). Every
objective is the ``latency`` of a chain of operators, so that planners for latency plan it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster, Device, pairs_of
from placement.costs.efficiency import Peak, RatesError
from placement.costs.predictors.roofline import calibrate, is_here
from placement.costs.runtimes import NOTHING, TILE, Cost, Runtime, runtime_of
from placement.graph import OpGraph
from placement.importers import check_table
from placement.importers.decoder import Decoder, Part
from placement.problem import Placement, Problem
from placement.profile import Profile

Floats = NDArray[np.float64]
PIECE = 512  # tokens of a prompt at a time: of llama.cpp (--ubatch-size), vLLM takes some more
NEVER_PAYS = PIECE + 1  # tokens: more than are computed at a time
MOST_TOKENS = 2**31
Tokens = tuple[int, float, float]  # how many, of how many sequences, how many are before each
_KEPT, _BUFFER = "kv_cache", "buffers"
# Half of the interval, as a logarithm, where groups have layers: nothing was fitted to groups, and
# six runs of an older vLLM took up to so many times as long (``experiments.tensor_parallel``).
_GROUPED = 0.68


class ServingError(ValueError):
    """Not what can be served: numbers of tokens that contradict each other."""


class Phase(StrEnum):
    """What is minimised: seconds for prompts, for a token of each sequence, or for both.

    ``serve`` is one prompt and its answer: ``prefill + (context - prompt) * decode``.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    SERVE = "serve"


@dataclass(frozen=True)
class Serving:
    """What is served.

    Attributes:
        phase: the objective.
        context: tokens of a sequence that there is room for; ``decode`` is of the last of them.
        batch: sequences at a time.
        prompt: tokens of a prompt; of None all for ``prefill``, and half of the context otherwise.
        whole_layers: a layer is on one device, with the first of them the embedding, with the last
            the head, as most programs have it; otherwise these may be apart, and so may what is
            routed (experts, or a dense feed-forward) from the rest of its layer.
    """

    phase: Phase
    context: int
    batch: int = 1
    prompt: int | None = None
    whole_layers: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "phase", Phase(self.phase))
        for name in ("context", "batch"):
            if not 1 <= getattr(self, name) <= MOST_TOKENS:
                raise ServingError(
                    f"{name} = {getattr(self, name)}: must be from 1 to {MOST_TOKENS}"
                )
        if self.prompt is not None and not 1 <= self.prompt <= self.context:
            raise ServingError(
                f"a prompt of {self.prompt} tokens: must be from 1 to the context of {self.context}"
            )

    @property
    def tokens(self) -> int:
        """Of a prompt."""
        whole = self.context if self.phase is Phase.PREFILL else max(1, self.context // 2)
        return whole if self.prompt is None else self.prompt

    @property
    def weights(self) -> tuple[float, float]:
        """How often prompts, and tokens of an answer, count in the objective."""
        return {
            Phase.PREFILL: (1.0, 0.0),
            Phase.DECODE: (0.0, 1.0),
            Phase.SERVE: (1.0, float(self.context - self.tokens)),
        }[self.phase]

    @property
    def rows(self) -> int:
        """Tokens that go through a layer together, at most."""
        return max(self.batch, min(PIECE, self.batch * self.context))


def serving_problem(decoder: Decoder, cluster: Cluster, serving: Serving) -> Problem:
    """The problem; the objective ``latency`` of its one micro-batch is that of ``serving``.

    Parameters are the weights, the cache of each layer's keys and values (no longer than its
    window), and what is between, once per device: of ``rows`` tokens the widest that a layer makes
    of them in 4 bytes, with attention a mask of them over the context in 2 bytes, and with the
    head the logits of a token of each sequence.

    Raises:
        ServingError: a device streams: what copies take beside a runtime is not known.
        RatesError: a device of which nothing is known, see ``Peak``.
    """
    if streaming := [d for d in cluster.devices if d.streams]:
        raise ServingError(
            f"device {streaming[0].name!r} streams, which is for captured modules: leave it out, "
            f"or describe a device like {streaming[0].streams!r}, with the bytes_per_s of its slot "
            "and the memory of the host, that reads weights where they lie"
        )
    check_table(decoder.name, len(decoder.parts) + 1, cluster.num_devices)
    here = list(zip(peaks(decoder, cluster), cluster.devices, strict=True))
    seconds = [
        [part_seconds(part, decoder, serving, *device) for device in here] for part in decoder.parts
    ]
    graph, held = _graph(decoder, serving, max(len(d.members) for d in cluster.devices) or 1)
    compute_s = np.array(seconds)
    profile = Profile(
        cluster.device_names,
        compute_s,
        np.zeros_like(compute_s),
        links=cluster.links,
        transfer_s=_transfers(graph, decoder, cluster, serving),
        predicted=np.ones(compute_s.shape, bool),
        provenance={
            "format": decoder.format,
            "objective": str(serving.phase),
            "context": serving.context,
            "batch": serving.batch,
            "prompt": serving.tokens,
            "predicted": "runtimes",
            "tied": bool(set(decoder.parts[0].weights) & set(decoder.parts[-1].weights)),
            "weights_bytes": [part.weight_bytes for part in decoder.parts],
            "num_experts": [part.num_experts for part in decoder.parts],
            **held,
        },
    )
    return Problem(graph, cluster, profile, "latency", num_microbatches=1, max_in_flight=1)  # type: ignore[arg-type]


def peaks(decoder: Decoder, cluster: Cluster) -> list[Peak]:
    """``[D]`` what the devices can do: as stated, as that of which they are described, or measured.

    Of a device of this machine what is stated counts, and what is not is measured.

    Raises:
        RatesError: a device is not here, and nothing is stated of it.
    """
    by_device = []
    by_name = {d.name: d for d in cluster.devices}
    for device in cluster.devices:
        source = by_name.get(device.measured_as, device)
        if source is not device:
            source = replace(source, speed=source.speed * device.speed)
        try:
            by_device.append(Peak.of(source, decoder.dtype))
        except RatesError:
            if device.like is not None or not is_here(device):
                raise
            rates = {x: getattr(device, x) for x in ("flops_per_s", "bytes_per_s", "call_s")}
            stated = {name: rate for name, rate in rates.items() if rate is not None}
            by_device.append(replace(calibrate(device), **stated))
    return by_device


def part_seconds(
    part: Part, decoder: Decoder, serving: Serving, peak: Peak, device: Device
) -> float:
    """Seconds of a part of the decoder in the objective of ``serving``.

    Each member of a group has its part of all tensors; they add up what attention makes, what the
    feed-forward makes, and what was looked up, and put the logits together.
    """
    prompts, answers = serving.weights
    runtime, ways = runtime_of(device.kind, decoder.format == "gguf"), len(device.members) or 1
    tokens: Tokens
    seconds = 0.0
    if prompts:
        pieces, rest = divmod(serving.batch * serving.tokens, PIECE)
        passes = [(PIECE, pieces), (rest, 1)]
        if part.kind == "head":  # of the last token of a prompt
            passes = [(serving.batch, 1)]
        for rows, count in passes:
            if rows and count:
                # On average half of the prompt is before a token.
                tokens = rows, ceil(rows / serving.tokens), (serving.tokens + 1) / 2
                one_s = pass_s(part, decoder.hidden, runtime, peak, tokens, ways)
                seconds += prompts * count * (one_s + _joined_s(part, decoder, device, rows))
    if answers:
        rows = serving.batch
        tokens = rows, rows, serving.context
        one_s = pass_s(part, decoder.hidden, runtime, peak, tokens, ways)
        seconds += answers * (one_s + _joined_s(part, decoder, device, rows))
    return seconds


def pass_s(
    part: Part, hidden: int, runtime: Runtime, peak: Peak, tokens: Tokens, ways: int = 1
) -> float:
    """Seconds of a pass on one of ``ways`` devices that share a part.

    Args:
        part: of the decoder.
        hidden: numbers that a token is between layers, 2 bytes each.
        runtime: the program on this kind of device.
        peak: of the device.
        tokens: of the pass. Keys and values are read once for each sequence, and at least for
            every ``TILE`` tokens.
        ways: devices that have a part of all tensors each.
    """
    rows, sequences, before = tokens
    moved = 4.0 * rows * hidden
    if part.kind == "embedding":
        return runtime.seconds(peak, part.kind, Cost(0.0, 2 * moved), NOTHING)
    ways = ways if part.can_be_cut and part.numel else 1
    work, read = 2.0 * part.numel * part.used * rows, part.weight_bytes * part.read(rows)
    products, cache = Cost(work / ways, read / ways + moved), NOTHING
    if part.kv_bytes:
        seen = before if part.window is None else min(before, part.window)
        times = sequences if part.window == 1 else max(sequences, rows / TILE)
        kept = seen * part.kv_bytes * times * _copies(part, ways) / ways
        cache = Cost(4.0 * part.width * rows * seen / ways, kept)
    last = runtime.token_s if part.kind == "head" and part.numel else 0.0
    return last + runtime.seconds(peak, part.kind, products, cache)


def _copies(part: Part, ways: int) -> float:
    """How often ``ways`` devices together keep its keys and values: a head of them is whole."""
    if not part.heads:
        return float(ways)
    return ceil(part.kv_heads / ways) * ways / part.kv_heads


def _joined_s(part: Part, decoder: Decoder, device: Device, rows: int) -> float:
    """Seconds of a group for what each of its members made of ``rows`` tokens.

    A ring (Patarasu and Yuan, JPDC 2009): ``k - 1`` times a ``k``-th goes to the next member, twice
    where results are added up.
    """
    k = len(device.members)
    is_routed = part.name.endswith(".router")  # its experts' results are added up behind it
    if k < 2 or not part.can_be_cut or is_routed or (part.kind == "head" and not part.numel):
        return 0.0
    rounds, numbers = (1, decoder.vocabulary) if part.kind == "head" else (2, decoder.hidden)
    one_s = device.ring_latency_s
    if device.ring_bytes_per_s is not None:
        one_s += 2.0 * rows * numbers / k / device.ring_bytes_per_s
    return rounds * (k - 1) * one_s


def buffers(decoder: Decoder, serving: Serving) -> dict[str, int]:
    """Bytes by name of what is between, once per device, and of each member of a group."""
    return {
        "mask": 2 * serving.rows * serving.context,
        "logits": 4 * serving.batch * decoder.vocabulary,
        "buffer": 4 * serving.rows * decoder.widest,
    }


def _graph(decoder: Decoder, serving: Serving, ways: int) -> tuple[OpGraph, dict[str, Any]]:
    """The chain, and which of its parameters are cache and which buffers.

    ``ways``: members of the largest group, for what they have copies of.
    """
    sizes: list[int] = []
    number: dict[str, int] = {}
    uses: list[tuple[int, int]] = []
    held: dict[str, list[int]] = {_KEPT: [], _BUFFER: []}

    def use(op: int, name: str, size: int, what: str | None = None) -> None:
        if name not in number:
            number[name] = len(sizes)
            sizes.append(size)
            if what is not None:
                held[what].append(number[name])
        uses.append((op, number[name]))

    group = []
    between = buffers(decoder, serving)
    for op, part in enumerate(decoder.parts):
        for name, size in part.weights.items():
            use(op, name, size if part.can_be_cut else size * ways)
        if part.kv_bytes:
            length = serving.context if part.window is None else min(serving.context, part.window)
            kept = serving.batch * length * part.kv_bytes * _copies(part, ways)
            use(op, f"{part.name} cache", int(kept), _KEPT)
            use(op, "mask", between["mask"], _BUFFER)
        if part.kind == "head":
            use(op, "logits", between["logits"], _BUFFER)
        use(op, "buffer", between["buffer"], _BUFFER)
        if serving.whole_layers:
            group.append(part.layer if part.layer != -2 else decoder.num_layers - 1)
            group[-1] = max(group[-1], 0)
        else:
            # Of experts in two parts the hot ones are beside attention.
            routed = part.name.endswith((".experts", ".experts#1", ".feed_forward"))
            group.append(2 * part.layer + routed)
    count = len(decoder.parts)
    graph = OpGraph.build(
        decoder.name,
        [part.name for part in decoder.parts],
        [-1, *range(count)],
        np.zeros(count + 1, np.int64),  # what flows is in the buffers
        [(t, t) for t in range(count)],
        op_kind=[part.kind for part in decoder.parts],
        op_module=[part.module for part in decoder.parts],
        op_signature=[_signature(part) for part in decoder.parts],
        param_bytes=sizes,
        param_uses=uses,
        group=group,
        output_tensor=[count],
    )
    return graph, held


def _signature(part: Part) -> str:
    return f"{part.kind}({part.weight_bytes}, {part.numel:.0f}, {part.kv_bytes}, {part.window})"


def _transfers(graph: OpGraph, decoder: Decoder, cluster: Cluster, serving: Serving) -> Floats:
    """float64 ``[T, D, D]``: seconds to hand tokens on, as often as the objective counts them."""
    count = cluster.num_devices
    links = Profile(cluster.device_names, np.zeros((1, count)), np.zeros((1, count)), cluster.links)
    one = OpGraph.build("one", ["a"], [-1], [0], [(0, 0)])
    pairs = Problem(one, cluster, links)
    prompts, answers = serving.weights
    tokens = serving.batch * serving.tokens
    times = prompts * ceil(tokens / min(PIECE, tokens)) + answers
    moved = 2.0 * decoder.hidden * (prompts * tokens + answers * serving.batch)
    fixed = pairs.link_latency_s + pairs.link_send_s
    per_byte = pairs.link_s_per_byte + pairs.link_send_s_per_byte
    hidden = times * fixed + moved * per_byte
    seconds = np.broadcast_to(hidden, (graph.num_tensors, count, count)).copy()
    seconds[0] = times * fixed + moved * 4 / (2.0 * decoder.hidden) * per_byte  # numbers of tokens
    return seconds


def memory(problem: Problem, placement: Placement) -> dict[str, dict[str, int]]:
    """By device: bytes of weights, cache and buffers, of all together, and what is there."""
    graph, held = problem.graph, problem.profile.provenance
    there = np.zeros((len(graph.param_bytes), problem.num_devices), bool)
    there[graph.param_use, placement[graph.param_use_op]] = True
    by_device = graph.param_bytes[:, None] * there
    cache, buffers = (by_device[held[what]].sum(axis=0) for what in (_KEPT, _BUFFER))
    needed = by_device.sum(axis=0)
    return {
        device.name: {
            "weights_bytes": int(needed[d] - cache[d] - buffers[d]),
            "kv_cache_bytes": int(cache[d]),
            "buffers_bytes": int(buffers[d]),
            "needed_bytes": int(needed[d]),
            "there_bytes": device.memory_bytes,
        }
        for d, device in enumerate(problem.cluster.devices)
    }


def largest_context(
    problem_at: Callable[[Serving], Problem], serving: Serving, fits: Callable[[Problem], bool]
) -> int:
    """The longest context, at most that of ``serving``, whose problem ``fits``; 0: none."""

    def fitting(context: int) -> bool:
        prompt = None if serving.prompt is None else min(serving.prompt, context)
        problem = problem_at(replace(serving, context=context, prompt=prompt))
        return problem.graph.param_bytes.sum() <= sum(problem.memory_bytes.tolist()) and fits(
            problem
        )

    low, high = 0, serving.context
    if fitting(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fitting(middle) else (low, middle)
    return low


def terms(
    decoder: Decoder, cluster: Cluster, serving: Serving, placement: Placement
) -> Mapping[str, float]:
    """``prefill_s`` and ``decode_s`` of a placement, whatever it was planned for."""
    from placement.simulator import simulate

    seconds = {}
    for phase in (Phase.PREFILL, Phase.DECODE):
        one = replace(serving, phase=phase, prompt=serving.tokens)
        problem = serving_problem(decoder, cluster, one)
        seconds[f"{phase}_s"] = float(simulate(problem, placement).latency_s)
    return seconds


def interval(
    decoder: Decoder, cluster: Cluster, placement: Placement
) -> Mapping[str, tuple[float, float]]:
    """By phase, by which factors seconds may be less and more: 90 % of other runs are between."""
    used = [cluster.devices[d] for d in sorted(set(placement.tolist()))]
    found = [runtime_of(device.kind, decoder.format == "gguf") for device in used]
    least = _GROUPED if any(device.members for device in used) else 0.0
    half = {
        str(x): max(least, *(getattr(one, x) for one in found))
        for x in (Phase.PREFILL, Phase.DECODE)
    }
    return {phase: (exp(-x), exp(x)) for phase, x in half.items()}


def min_batch(decoder: Decoder, cluster: Cluster) -> int | None:
    """From how many tokens at a time on it pays to copy weights of the processor to a GPU.

    So many that the copy and the GPU's seconds are fewer than the processor's: ``r* = copy / (CPU -
    GPU)`` of a matrix that is read whole, and of experts those that the tokens are routed to. It
    is of experts where there are some, else of feed-forwards, and of the first processor and the
    GPU with the fastest memory. ``NEVER_PAYS``: it never does, so
    long as no more are computed at a time (``--ubatch-size``). None: no GPU, processor or link.
    """
    hosts = [d for d, device in enumerate(cluster.devices) if device.kind == "cpu"]
    gpus = [d for d, device in enumerate(cluster.devices) if device.kind != "cpu"]
    kinds = {part.kind: part for part in decoder.parts}
    part = kinds.get("experts") or kinds.get("feed_forward")
    if not hosts or not gpus or part is None:
        return None
    rates = peaks(decoder, cluster)
    host, gpu = hosts[0], max(gpus, key=lambda d: rates[d].bytes_per_s)
    ends = pairs_of(cluster.links, cluster.device_names)
    links = [x for a, b, x in ends if host in np.ravel(a) and gpu in np.ravel(b)]
    if not links:
        return None
    link = links[-1]  # of a pair the last counts

    def pays(tokens: int) -> bool:
        asked = Serving(Phase.PREFILL, tokens, 1, tokens)
        there, here = (
            part_seconds(part, decoder, asked, rates[d], cluster.devices[d]) for d in (gpu, host)
        )
        copied = part.weight_bytes * part.read(tokens)
        return link.latency_s + copied / link.bandwidth_bytes_per_s + there < here

    return 1 + bisect_left(range(1, NEVER_PAYS), True, key=pays)
