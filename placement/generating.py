"""``language_model``: a causal language model of transformers that writes texts where plans say.

Keys and values of all tokens so far are what a pass reads and returns: tensors with room for the
whole context, so that every pass has the same shapes. A prompt is read in chunks of one length. A
short one is filled up behind its end: no token of the text sees that, and those that follow take
its place. The last of several chunks begins so much earlier that it is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from placement.capturing import capture
from placement.cluster import Cluster
from placement.executor import equality
from placement.executor.streamed import streaming_where_short
from placement.graph import OpGraph
from placement.objective import Objective
from placement.optimizing import (
    MODULE,
    NothingFits,
    OptimizedRunner,
    check_options,
    cluster_of,
    optimized,
    verdict,
)
from placement.plan import Plan
from placement.problem import Problem, ProblemError, host_of
from placement.profile import Profile
from placement.program import DependsOnValues, Ref, view_of
from placement.tools.progress import progress, say, says_when_compiling
from placement.workloads import import_transformers

transformers: Any = import_transformers()
_Cache = list[
    tuple[Tensor, Tensor]
]  # keys and values of each layer, [batch, heads, context, width]


class LanguageModelError(ValueError):
    """The model, or what it is asked to write, does not do; the message says what to change."""


def language_model(
    model: nn.Module,
    batch: int = 1,
    context: int = 64,
    *,
    cluster: Cluster | Sequence[str] | None = None,
    chunk: int = 64,
    objective: str = "latency",
    seconds: float = 10.0,
    quiet: bool = False,
    compiled: bool | None = None,
) -> LanguageModel:
    """A causal language model of transformers on the devices of a plan, ready to ``generate``.

    Captures a step of decoding, and the reading of a chunk of a prompt, each with a cache of keys
    and values for the whole context. Plans, checks and measures both as ``placement.optimize`` does
    for whole operators. The weights lie once: the prompt reads them where the step has them. Of
    those in host memory, a GPU that copies some for the step may copy others for the prompt.

    Args:
        model: for causal language modelling (``AutoModelForCausalLM``), in evaluation mode, from a
            configuration or loaded.
        batch: rows of a text, which are written together.
        context: most tokens of a row, prompt and answer.
        cluster: a ``Cluster`` of this machine, or names of ``Cluster.detect()``; None: all.
        chunk: tokens of a prompt that are read at a time. More are faster for long prompts, and
            where weights are copied to a GPU; fewer for short ones. Half as many, and again, where
            there is no memory for so many.
        objective: ``latency``, seconds of a step, or ``period``, seconds between the steps of
            several texts.
        seconds: as for ``optimize``, for the step and again for the prompt.
        quiet: say nothing.
        compiled: as for ``optimize``.

    Raises:
        LanguageModelError: no causal language model with keys and values, or impossible numbers.
        OptimizeError, CaptureError, ClusterError, ProfileError: as ``optimize``.
    """
    _check_model(model)
    _check_sizes(model, batch=batch, context=context, chunk=chunk)
    check_options(objective, seconds)
    devices = cluster_of(cluster)
    cache = _empty_cache(model, batch, context)
    _check_cached(model, cache, devices)
    with progress(quiet) as report, says_when_compiling(quiet):
        make = _Maker(_Step(model).eval(), cache, Objective(objective), seconds)
        options = {"quiet": quiet, "compiled": compiled, "report": report}
        step = make.step(devices, options)
        try:
            prompt, chunk = make.prompt(step, min(chunk, context), options)
        except BaseException:
            step.close()
            raise
    if not quiet:
        say(f"a step: {verdict(step)}")
        if prompt is not step:
            say(f"{chunk} tokens of a prompt: {verdict(prompt)}")
    return LanguageModel(model, step, prompt, batch, context, chunk, cache)


class LanguageModel:
    """What ``language_model`` makes; a context manager.

    Attributes:
        model: the module. Both runners read its parameters: what is written to them shows.
        step: writes one token more of each row; has a ``plan``, and what was ``measured``.
        prompt: reads ``chunk`` tokens; where no more than one fits, it is ``step``.
        batch, context, chunk: see ``language_model``.
    """

    def __init__(
        self,
        model: Any,
        step: OptimizedRunner,
        prompt: OptimizedRunner,
        batch: int,
        context: int,
        chunk: int,
        cache: _Cache,
    ) -> None:
        self.model, self.step, self.prompt = model, step, prompt
        self.batch, self.context, self.chunk = batch, context, chunk
        self._cache = cache  # of no token; nobody writes to it

    @property
    def plan(self) -> Plan:
        """That of a step; that of a prompt is ``prompt.plan``."""
        return self.step.plan

    def generate(
        self,
        tokens: Tensor | Sequence[Tensor],
        max_new_tokens: int,
        *,
        stop: int | Sequence[int] | None = None,
        streamer: Any = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        logits_processor: Iterable[Any] = (),
        seed: int | None = None,
    ) -> Any:
        """The texts and what follows, token for token what ``model.generate`` writes.

        Greedy, the likeliest token each time, unless one of ``temperature``, ``top_k``, ``top_p``
        and ``seed`` asks for samples. What else the model's ``generation_config`` says about the
        scores (a repetition penalty) holds.

        Args:
            tokens: int64 ``[batch, n]``: rows of equal length, all of it text. Or a list of such
                texts, of any lengths: while one device works on one of them, the next works on
                another.
            max_new_tokens: so many are written, unless each row has come to a stop token before.
            stop: token, or tokens, that end a row; None: the model's own; (): none. A row that has
                ended goes on with the model's padding token, or else its first stop token.
            streamer: with ``put`` and ``end``, as ``transformers.TextStreamer``: is given the
                prompt, then each token as it is written. For one text.
            temperature: scores are divided by it before one is drawn: the smaller, the greedier.
            top_k: only so many tokens can be drawn, the likeliest.
            top_p: only the likeliest tokens can be drawn whose probabilities add up to so much.
            logits_processor: of transformers, in this order, before these three.
            seed: of what is drawn for the first text, one more for each further text; None:
                PyTorch's own generator draws.

        Returns:
            int64 ``[batch, n + new]``: prompt and answer; of a list, a list of these.

        Raises:
            LanguageModelError: tokens or numbers that do not fit; the message has them.
            RunnerError: closed, or in use by another thread.
        """
        is_list = isinstance(tokens, list | tuple)
        prompts: list[Any] = [*tokens] if is_list else [tokens]
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise LanguageModelError(f"max_new_tokens = {max_new_tokens!r}: must be at least 1")
        for i, one in enumerate(prompts):
            self._check_tokens(one, f"text {i}" if is_list else "tokens", max_new_tokens)
        if streamer is not None and len(prompts) != 1:
            raise LanguageModelError(
                f"a streamer shows one text, {len(prompts)} are given: call generate for each"
            )
        drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, **self._ends(stop)}
        options["logits_processor"] = transformers.LogitsProcessorList(logits_processor)
        options |= _sampling(drawn, seed)
        texts = [
            _Text(self, one, None if seed is None else seed + i, streamer, options)
            for i, one in enumerate(prompts)
        ]
        self._write(texts)
        return [text.tokens for text in texts] if is_list else texts[0].tokens

    def close(self) -> None:
        """End the workers; nothing can be written afterwards. Idempotent."""
        self.step.close()
        self.prompt.close()

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, texts: Sequence[_Text]) -> None:
        """At most so many texts at once as are in flight: each has a cache of its own."""
        room = self.step.plan.max_in_flight
        later, ready = deque(texts[room:]), deque(self._read(texts[:room]))
        while ready or later:
            if not ready:  # prompts whose first token ended them
                ready.extend(self._read([later.popleft()]))
            for text in _passed(self.step, ready):
                if not text.is_complete:
                    ready.append(text)
                elif later:
                    ready.extend(self._read([later.popleft()]))

    def _read(self, texts: Sequence[_Text]) -> Iterable[_Text]:
        """Those of the texts that go on after their prompt."""
        if self.prompt is self.step:
            return texts
        unread, read = deque(texts), list[_Text]()
        for text in _passed(self.prompt, unread):
            (read if text.is_read else unread).append(text)
        return [text for text in read if not text.is_complete]

    def _check_tokens(self, tokens: Any, what: str, max_new_tokens: int) -> None:
        """Raises: LanguageModelError, not ``[batch, n]`` tokens that leave room for so many."""
        if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64:
            kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise LanguageModelError(
                f"{what} is {kind}: give torch.int64 [{self.batch}, n], as a tokenizer with "
                'return_tensors="pt" does, or a list of them'
            )
        if tokens.ndim != 2 or len(tokens) != self.batch or not tokens.shape[1]:
            raise LanguageModelError(
                f"{what} has shape {[*tokens.shape]}, must be [{self.batch}, n] with n of at least "
                f"1: for other rows make language_model(model, batch=...), texts of other lengths "
                "go into a list"
            )
        length, most = tokens.shape[1], self.context
        if length + max_new_tokens > most:
            raise LanguageModelError(
                f"{what} has {length} tokens and max_new_tokens = {max_new_tokens}, in all "
                f"{length + max_new_tokens}, but the context is {most}: make "
                f"language_model(model, context={length + max_new_tokens}), or ask for "
                + (f"at most {most - length}" if length < most else "a shorter text")
            )
        size = self.model.get_input_embeddings().num_embeddings
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= size:
            raise LanguageModelError(
                f"{what} holds token {low if low < 0 else high}: the model has 0 to {size - 1}"
            )

    def _ends(self, stop: int | Sequence[int] | None) -> dict[str, Any]:
        """Options of ``model.generate``. Raises: LanguageModelError, a stop that is no token."""
        config = self.model.generation_config
        ends = config.eos_token_id if stop is None else stop
        ends = [] if ends is None else [ends] if isinstance(ends, int) else [*ends]
        if any(type(x) is not int or x < 0 for x in ends):
            raise LanguageModelError(f"stop = {stop!r}: give a token's number, or several, or ()")
        size = self.model.get_input_embeddings().num_embeddings
        if stop is not None and (never := [x for x in ends if x >= size]):
            raise LanguageModelError(
                f"stop = {stop!r}: the model has tokens 0 to {size - 1}, so {never[0]} never comes"
            )
        pad = config.pad_token_id
        pad = pad if isinstance(pad, int) or not ends else ends[0]
        return {"eos_token_id": ends or None, "pad_token_id": pad}


def _passed(runner: OptimizedRunner, ready: deque[_Text]) -> Iterator[_Text]:
    """Each text of ``ready`` after a pass; who takes it may put it there again."""
    passing: deque[_Text] = deque()

    def inputs() -> Iterator[Any]:
        while ready:
            passing.append(ready.popleft())
            yield passing[-1].inputs()

    while ready:
        if len(ready) == 1:  # a call takes less time than a stream of one
            text = ready.popleft()
            text.take(*runner(*text.inputs()))
            yield text
            continue
        # With more, it would ask for a text while all are under way, and end.
        runner.max_in_flight = min(runner.plan.max_in_flight, len(ready))
        with closing(runner.stream(inputs(), workers=0)) as results:  # type: ignore[type-var]
            for result in results:
                text = passing.popleft()
                text.take(*result)
                yield text


class _Text:
    """A text while it is written.

    Attributes:
        is_read: the prompt is in the cache; so is all of the text but the last token.
        is_complete: nothing is to be written any more.
    """

    def __init__(
        self,
        writer: LanguageModel,
        prompt: Tensor,
        seed: int | None,
        streamer: Any,
        options: Mapping[str, Any],
    ) -> None:
        self._chunk, self._cache, self._streamer = writer.chunk, writer._cache, streamer
        self._samples, self._random = options["do_sample"], None
        if seed is not None:
            self._random = torch.Generator().manual_seed(seed)
        prompt = prompt.cpu()
        self._processors, self._criteria = _prepared(writer.model, prompt, options)
        rows, self._length = prompt.shape
        empty = torch.zeros(rows, options["max_new_tokens"], dtype=torch.int64)
        self._all = torch.cat([prompt, empty], 1)
        self._pad = torch.tensor(options["pad_token_id"] or 0)
        self._ended = torch.zeros(rows, dtype=torch.bool)
        self._seen = self._until = 0  # tokens in the cache, now and after the pass
        self.is_read = self.is_complete = False
        if streamer is not None:
            streamer.put(prompt)

    @property
    def tokens(self) -> Tensor:
        """int64 ``[batch, n]``."""
        return self._all[:, : self._length]

    def inputs(self) -> tuple[Any, ...]:
        """Of the next pass."""
        size = 1 if self.is_read else self._chunk
        begin = max(min(self._seen, self._length - size), 0)
        self._until = min(begin + size, self._length)
        block = self._all[:, begin : self._until]
        block = nn.functional.pad(block, (0, size - block.shape[1])).contiguous()
        inputs = block, self._cache, torch.tensor(begin)
        return inputs if size == 1 else (*inputs, torch.tensor([self._until - begin - 1]))

    def take(self, logits: Tensor, cache: _Cache) -> None:
        """What a pass returned; the next token, if it read all that is there."""
        self._cache, self._seen = cache, self._until
        if self._seen < self._length:
            return
        self.is_read = True
        scores = self._processors(self.tokens, logits.cpu().float())
        if self._samples:
            likely = scores.softmax(-1)
            token = torch.multinomial(likely, 1, generator=self._random).squeeze(1)
        else:
            token = scores.argmax(-1)
        if self._criteria:
            token = torch.where(self._ended, self._pad, token)
        self._all[:, self._length] = token
        self._length += 1
        if self._streamer is not None:
            self._streamer.put(token)
        if self._criteria:
            self._ended |= self._criteria(self.tokens, scores)
        self.is_complete = self._length == self._all.shape[1] or bool(self._ended.all())
        if self.is_complete:
            self._cache = []
            if self._streamer is not None:
                self._streamer.end()


def _prepared(model: Any, prompt: Tensor, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """What changes scores, and what ends rows before their time: of options and configuration."""

    def prepared(
        model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, **_: Any
    ) -> tuple[Any, Any]:
        mine = [x for x in stopping_criteria if not isinstance(x, transformers.MaxLengthCriteria)]
        return logits_processor, transformers.StoppingCriteriaList(mine)

    everything = torch.ones_like(prompt)
    facts: dict[str, Any] = {"attention_mask": everything, "num_beams": 1, **options}
    return model.generate(prompt, custom_generate=prepared, **facts)  # type: ignore[no-any-return]


def _sampling(drawn: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """Options of ``model.generate``. Raises: LanguageModelError, a number out of its range."""
    ranges = {"temperature": (0, np.inf, "above 0"), "top_p": (0, 1, "above 0 and at most 1")}
    for name, (low, high, said) in ranges.items():
        x = drawn[name]
        if x is not None and not (isinstance(x, int | float) and low < x <= high and x < np.inf):
            raise LanguageModelError(f"{name} = {x!r}: must be {said}; None: it does nothing")
    for name, x, low in (("top_k", drawn["top_k"], 1), ("seed", seed, 0)):
        if x is not None and (type(x) is not int or x < low):
            raise LanguageModelError(f"{name} = {x!r}: must be a whole number of at least {low}")
    if seed is None and {*drawn.values()} == {None}:
        return {"do_sample": False, **drawn}
    none: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    none |= {name: x for name, x in drawn.items() if x is not None}
    return {"do_sample": True, **none, "temperature": float(none["temperature"])}


class _Layer(transformers.cache_utils.StaticLayer):  # type: ignore[misc]
    """Keys and values ``[batch, heads, context, width]``, of which so many tokens are there."""

    def __init__(self, keys: Tensor, values: Tensor, seen: Tensor) -> None:
        super().__init__(keys.shape[2])
        self.keys, self.values, self.is_initialized = keys, values, True
        self.cumulative_length = seen

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """New tensors: a pass writes to none of its inputs."""
        at = self.cumulative_length + torch.arange(keys.shape[2], device=keys.device)
        self.keys = self.keys.index_copy(2, at, keys)
        self.values = self.values.index_copy(2, at, values)
        return self.keys, self.values


class _Step(nn.Module):
    """Scores of the token after one of ``tokens``, ``[batch, vocabulary]``, and the new cache.

    ``last``: int64 ``[1]``, behind which of them; None: the last. ``told``: whether the model is
    given the places of the tokens and a mask, of which it makes tensors as long as the text so far.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.told = model, False

    def forward(
        self, tokens: Tensor, cache: _Cache, seen: Tensor, last: Tensor | None = None
    ) -> tuple[Tensor, _Cache]:
        past = transformers.Cache(layers=[_Layer(*pair, seen) for pair in cache])
        options = {} if last is None else {"logits_to_keep": last}
        if self.told:
            at = seen + torch.arange(tokens.shape[1], device=tokens.device)
            options["position_ids"] = at.expand(tokens.shape)
            options["attention_mask"] = tokens.new_ones(len(tokens), cache[0][0].shape[2])
        logits = self.model(tokens, past_key_values=past, use_cache=True, **options).logits
        return logits[:, -1], [(layer.keys, layer.values) for layer in past.layers]


@dataclass(frozen=True)
class _Maker:
    """Captures ``module`` and plans it, for a step and for a prompt."""

    module: _Step
    cache: _Cache
    objective: Objective
    seconds: float

    def step(self, devices: Cluster, options: Mapping[str, Any]) -> OptimizedRunner:
        """On these devices."""

        def problem(graph: OpGraph, profile: Profile) -> Problem:
            cluster, costs = streaming_where_short(graph, devices, profile)
            in_flight = max(4, cluster.num_devices)  # texts at once
            posed = Problem(graph, cluster, costs, self.objective, max_in_flight=in_flight)
            return _with_cache_there(posed)

        return self._runner(1, devices, problem, options)

    def prompt(
        self, step: OptimizedRunner, chunk: int, options: Mapping[str, Any]
    ) -> tuple[OptimizedRunner, int]:
        """Beside the step, which a chunk of one token is; and the length of the chunks."""

        def problem(graph: OpGraph, profile: Profile) -> Problem:
            posed = Problem(graph, step.cluster, profile, self.objective)
            return _beside(step, _with_cache_there(posed))

        while chunk > 1:
            step.release()  # what is tried needs its memory
            try:
                return self._runner(chunk, step.cluster, problem, options), chunk
            except (NothingFits, ProblemError, torch.OutOfMemoryError):
                chunk //= 2
        return step, 1

    def _runner(
        self, size: int, cluster: Cluster, problem: Any, options: Mapping[str, Any]
    ) -> OptimizedRunner:
        options["report"](f"capturing {size} tokens", None)
        inputs = _example(self.cache, size)
        name = type(self.module.model).__name__
        try:
            graph = capture(self.module, inputs, name=name)
        except DependsOnValues:  # OPT counts the tokens that it has seen
            if self.module.told:
                raise
            self.module.told = True
            graph = capture(self.module, inputs, name=name)
        graph = _with_cache_back(graph)
        runner, _ = optimized(graph, cluster, problem, inputs, self.seconds, self.module, **options)
        runner.stop()
        runner.outputs_stay = runner.has_company = True
        return runner


def _with_cache_back(graph: OpGraph) -> OpGraph:
    """The graph of a pass, whose program says that the cache it returns is that of the next."""
    program = graph.program
    assert program is not None
    pairs = zip(program.input_tensors[1:], program.output_leaves[1:], strict=False)
    back = tuple((t, leaf.tensor) for t, leaf in pairs if isinstance(leaf, Ref))
    return replace(graph, program=replace(program, comes_back=back))


def _with_cache_there(problem: Problem) -> Problem:
    """The problem where the cache is sent nowhere: the operator that reads a part of it made it."""
    graph = problem.graph
    assert graph.program is not None
    size = graph.tensor_bytes[:, None, None].astype(np.float64)
    seconds = problem.link_latency_s + size * problem.link_s_per_byte
    seconds[[t for t, _ in graph.program.comes_back]] = 0.0
    return replace(problem, profile=replace(problem.profile, transfer_s=seconds))


def _beside(step: OptimizedRunner, prompt: Problem) -> Problem:
    """The problem of a prompt with the weights where the step has them, and the memory it leaves.

    What lies in host memory may be copied to a GPU, if that is a device, and the other way round.
    """
    if step.kept in MODULE:  # which the weights of both are
        return prompt
    graph, cluster, at = step.graph, prompt.cluster, step.plan.placement(step.graph, step.cluster)
    assert graph.program is not None and prompt.graph.program is not None
    streaming, host = cluster.streaming, host_of(prompt)[0]
    held: dict[Any, set[int]] = {}
    for p, op in zip(graph.param_use.tolist(), graph.param_use_op.tolist(), strict=True):
        held.setdefault(view_of(graph.program.params[p]), set()).add(int(at[op]))
    compute_s, params = prompt.profile.compute_s.copy(), prompt.graph.program.params
    uses = prompt.graph.param_use.tolist(), prompt.graph.param_use_op.tolist()
    for p, op in zip(*uses, strict=True):
        if (on := held.get(view_of(params[p]))) is not None:
            is_host = any(d in streaming or cluster.devices[d].kind == "cpu" for d in on)
            may = on | ({host, *streaming} if is_host and streaming else set())
            compute_s[op, [d not in may for d in range(cluster.num_devices)]] = np.inf
    resident = graph.param_bytes @ _held(graph, at, cluster.num_devices)
    resident[host] += resident[streaming].sum()  # one page-locked copy, for both
    left = step.plan.limits.headroom_bytes
    devices = tuple(
        d if d.streams else replace(d, memory_bytes=max(left[d.name] + int(resident[i]), 1))
        for i, d in enumerate(cluster.devices)
    )
    profile = replace(prompt.profile, compute_s=compute_s)
    return replace(prompt, cluster=replace(cluster, devices=devices), profile=profile)


def _held(graph: OpGraph, at: Any, num_devices: int) -> Any:
    """bool ``[P, D]``: which device has which parameter."""
    held = np.zeros((len(graph.param_bytes), num_devices), bool)
    held[graph.param_use, at[graph.param_use_op]] = True
    return held


def _example(cache: _Cache, size: int) -> tuple[Any, ...]:
    """Inputs of ``_Step`` for so many tokens."""
    keys = cache[0][0]
    tokens = torch.zeros(len(keys), size, dtype=torch.int64, device=keys.device)
    seen = torch.tensor(0, device=keys.device)
    inputs = tokens, cache, seen
    return inputs if size == 1 else (*inputs, torch.tensor([size - 1], device=keys.device))


def _empty_cache(model: Any, batch: int, context: int) -> _Cache:
    """Zeros of the shapes that the model's own cache has.

    Raises:
        LanguageModelError: it has other things in there.
    """
    name = type(model).__name__
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        layers = getattr(
            getattr(model(tokens, use_cache=True), "past_key_values", None), "layers", None
        )
    cache = []
    for i, layer in enumerate(layers or ()):
        pair: Any = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not all(isinstance(x, Tensor) and x.ndim == 4 and x.shape[2] == 2 for x in pair):
            raise LanguageModelError(
                f"{name} keeps other things than keys and values of each token (layer {i}: "
                f"{type(layer).__name__}): write with model.generate"
            )
        cache.append(tuple(x.new_zeros(batch, x.shape[1], context, x.shape[3]) for x in pair))
    if not cache:
        raise LanguageModelError(f"{name} keeps no keys and values: write with model.generate")
    return cache


def _check_cached(model: Any, cache: _Cache, cluster: Cluster) -> None:
    """Raises: LanguageModelError, the model computes something else where it has seen a part."""
    (_, _, context, _), step = cache[0][0].shape, _Step(model)
    if context < 3:
        return
    tokens, *inputs = _example([(k[:1], v[:1]) for k, v in cache], 3)
    tokens, seen = tokens[:1] + torch.arange(3, device=tokens.device), inputs[1]
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits[:, -1]
        _, past = step(tokens[:, :2], inputs[0], seen)
        logits, _ = step(tokens[:, 2:], past, seen + 2)
    tolerance = equality.Tolerance.of([*model.parameters(), expected], cluster)
    if wrong := equality.difference([logits], [expected], tolerance):
        raise LanguageModelError(
            f"{type(model).__name__} does not compute the same token by token ({wrong}): it is no "
            "causal language model, or keeps more than keys and values; write with model.generate"
        )


def _check_model(model: Any) -> None:
    """Raises: LanguageModelError, no causal language model of transformers that is ready."""
    name = type(model).__name__
    if not isinstance(model, transformers.PreTrainedModel):
        raise LanguageModelError(
            f"a {name} is given, not a model of transformers: make one with "
            "AutoModelForCausalLM.from_config or from_pretrained"
        )
    if model.config.is_encoder_decoder:
        raise LanguageModelError(
            f"{name} is an encoder-decoder, which reads a text and writes another: "
            "placement.language_model is for decoders; write with model.generate"
        )
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise LanguageModelError(
            f"{name} writes no text: take the class with a language-model head, "
            "AutoModelForCausalLM"
        )
    if model.training:
        raise LanguageModelError(f"{name} is in training mode: call model.eval() first")


def _check_sizes(model: Any, **sizes: Any) -> None:
    """Raises: LanguageModelError, no whole number, or more tokens than the model has places."""
    for name, x in sizes.items():
        if type(x) is not int or x < 1:
            raise LanguageModelError(f"{name} = {x!r}: must be a whole number of at least 1")
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and sizes["context"] > most:
        raise LanguageModelError(
            f"context = {sizes['context']}, but {type(model).__name__} has places for {most} "
            "tokens (max_position_embeddings): ask for at most so many"
        )
