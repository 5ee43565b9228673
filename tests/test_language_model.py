"""``language_model``: what ``model.generate`` of transformers writes, written where plans say."""

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import placement
from placement import generating, optimizing, planners
from placement.capturing import capture
from placement.cluster import Cluster, Device, Link
from placement.executor import Runner, RunnerError
from placement.generating import LanguageModel, LanguageModelError
from placement.graph import OpGraph
from placement.objective import Objective
from placement.plan import Measured, Spread
from placement.problem import Problem, Solution
from placement.profile import Profile
from placement.runs import ways
from placement.simulator import score
from tests import emulated_gpu

needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")

SMALL = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
FEWER = {**SMALL, "num_key_value_heads": 2}  # heads of keys and values than of queries
LOCAL = {**FEWER, "head_dim": 8, "sliding_window": 8}
GPT2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
# Class of the model, of its configuration, and what that holds.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", FEWER),
    "mistral": ("MistralForCausalLM", "MistralConfig", LOCAL),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", FEWER | {"num_local_experts": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", FEWER | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", FEWER | {"head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", LOCAL | {"num_hidden_layers": 2}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", LOCAL),
    "phi": ("PhiForCausalLM", "PhiConfig", FEWER),
    "falcon": ("FalconForCausalLM", "FalconConfig", SMALL),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "opt": ("OPTForCausalLM", "OPTConfig", SMALL | {"word_embed_proj_dim": 32, "ffn_dim": 64}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config", SMALL | {
            "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
            "first_k_dense_replace": 0,
        },
    ),
}  # fmt: skip
IN_CHUNKS = {"llama", "mixtral", "gemma2", "phi", "gpt2", "deepseek_v3"}
DTYPES = {"qwen2": torch.bfloat16, "qwen3": torch.float16}


def model_of(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    kind, config, facts = FAMILIES[family]
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    made = getattr(transformers, config)(**{**facts, **ends, **more})
    return getattr(transformers, kind)(made).eval()


def prompt_of(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, (batch, length), generator=generator)


def writer_of(model: Any, **options: Any) -> LanguageModel:
    facts = {"context": 32, "chunk": 8, "cluster": ["cpu:0"], "seconds": 0.05, "quiet": True}
    return placement.language_model(model, **{**facts, **options})


@pytest.fixture(autouse=True)
def _not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator takes a microsecond everywhere, and no way to run is faster than the plan."""

    def profile(graph: OpGraph, cluster: Cluster, **_: Any) -> Profile:
        names = cluster.workers.device_names
        seconds = np.full((graph.num_ops, len(names)), 1e-6)
        return Profile(names, seconds, 0 * seconds).for_cluster(cluster)

    monkeypatch.setattr(optimizing, "load_or_measure", profile)

    def measure(by_name: dict[str, Any], report: Any) -> dict[str, Measured]:
        each = {name: Spread.of([1e-6 if name == "plan" else 1.0]) for name in by_name}
        facts: Any = {"n": 1, "when": "now", "machine": "here"}
        return {name: Measured(latency_s=x, period_s=x, **facts) for name, x in each.items()}

    for module in (optimizing, ways):
        monkeypatch.setattr(module, "measure", measure)


@pytest.fixture(scope="module")
def made() -> Iterator[dict[int, LanguageModel]]:
    writers: dict[int, LanguageModel] = {}
    yield writers
    for writer in writers.values():
        writer.close()


@pytest.fixture
def llama(made: dict[int, LanguageModel]) -> LanguageModel:
    return made.get(1) or made.setdefault(1, writer_of(model_of("llama")))


@pytest.fixture
def two_rows(made: dict[int, LanguageModel]) -> LanguageModel:
    return made.get(2) or made.setdefault(2, writer_of(model_of("llama"), batch=2, chunk=1))


def expected(model: Any, tokens: Tensor, new: int, **options: Any) -> Tensor:
    facts = {"max_new_tokens": new, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    text: Tensor = model.generate(tokens, **facts | options)
    return text


@pytest.fixture
def in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans put each group on one of the devices that may run it, one device after another."""

    def shared(problem: Problem) -> Solution:
        graph = problem.graph
        able = [np.flatnonzero(x) for x in problem.supported]
        chosen = [on[len(on) * g // graph.num_groups] for on, g in zip(able, graph.group)]  # noqa: B905
        placement = np.array(chosen, np.int32)
        return Solution(placement, float(score(problem, placement[None])[0]))

    only = SimpleNamespace(load=lambda *_, **__: shared, solve=planners.solve)
    monkeypatch.setattr(optimizing, "planners", only)
    monkeypatch.setattr(optimizing, "parameters_of", lambda planner: {})


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(family: str) -> None:
    """Prompts shorter than a chunk, of one, and of several whose last is moved back to be full.

    Half of the families read theirs by steps: a capture takes longer than all else here.
    """
    model = model_of(family).to(DTYPES.get(family, torch.float32))
    chunk = 8 if family in IN_CHUNKS else 1
    with writer_of(model, chunk=chunk) as writer:
        assert (writer.prompt is writer.step) == (chunk == 1) and writer.chunk == chunk
        prompts = [prompt_of(3), prompt_of(8), prompt_of(19)]
        for text, tokens in zip(writer.generate(prompts, 11), prompts, strict=True):
            assert torch.equal(text, expected(model, tokens, 11))
    with pytest.raises(RunnerError, match="closed"):
        writer.generate(prompt_of(3), 2)


def test_a_text_may_fill_the_context(llama: LanguageModel) -> None:
    tokens = prompt_of(31)
    assert torch.equal(llama.generate(tokens, 1), expected(llama.model, tokens, 1))


def test_rows_end_at_stop_tokens_and_go_on_with_padding(two_rows: LanguageModel) -> None:
    model, tokens = two_rows.model, prompt_of(5, batch=2)
    free = two_rows.generate(tokens, 12)
    assert free.shape == (2, 17)
    # One row ends at the third token, the other at the sixth or later: then all is complete.
    stop = [int(free[0, 7]), int(free[1, 10])]
    text = two_rows.generate(tokens, 12, stop=stop)
    assert torch.equal(text, expected(model, tokens, 12, eos_token_id=stop, pad_token_id=stop[0]))
    assert text.shape[1] < 17
    model.generation_config.eos_token_id = stop
    model.generation_config.pad_token_id = 99
    try:
        own = two_rows.generate(tokens, 12)
        assert torch.equal(own, expected(model, tokens, 12)) and (own[0, 8:] == 99).all()
        assert torch.equal(two_rows.generate(tokens, 12, stop=()), free)
    finally:
        model.generation_config.eos_token_id = model.generation_config.pad_token_id = None


def test_a_stop_token_that_never_comes_ends_nothing(llama, capfd):
    free = llama.generate(prompt_of(5), 6)
    never = next(x for x in range(100) if x not in free[0, 5:])
    assert torch.equal(llama.generate(prompt_of(5), 6, stop=never), free)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 2, "top_k": 9}, {}],
)
def test_samples_are_those_of_generate_from_the_same_seed(two_rows, asked):
    tokens, plain = prompt_of(5, batch=2), {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    text = two_rows.generate(tokens, 10, seed=3, **asked)
    torch.manual_seed(3)
    options = plain | {k: float(x) if k == "temperature" else x for k, x in asked.items()}
    assert torch.equal(text, expected(two_rows.model, tokens, 10, do_sample=True, **options))
    assert not torch.equal(text, two_rows.generate(tokens, 10, seed=4, **asked))
    torch.manual_seed(3)  # without a seed PyTorch's own generator draws
    if asked:
        assert torch.equal(text, two_rows.generate(tokens, 10, **asked))


def test_processors_of_transformers_and_of_the_models_configuration(llama: LanguageModel) -> None:
    model, tokens = llama.model, prompt_of(5)
    penalty = transformers.RepetitionPenaltyLogitsProcessor(3.0)
    text = llama.generate(tokens, 12, logits_processor=[penalty])
    assert torch.equal(text, expected(model, tokens, 12, repetition_penalty=3.0))
    assert not torch.equal(text, llama.generate(tokens, 12))
    model.generation_config.repetition_penalty = 3.0
    try:
        assert torch.equal(text, llama.generate(tokens, 12))
    finally:
        model.generation_config.repetition_penalty = None


class Kept:
    """A streamer that keeps what it is given; after so many tokens it calls ``then``."""

    def __init__(self, most: int = -1, then: Any = None) -> None:
        self.given: list[Tensor] = []
        self.ended, self._most, self._then = 0, most, then

    def put(self, value: Tensor) -> None:
        self.given.append(value.clone())
        if len(self.given) == self._most:
            self._then()

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_is_given_what_transformers_gives_it(llama: LanguageModel) -> None:
    ours, theirs = Kept(), Kept()
    llama.generate(prompt_of(5), 4, streamer=ours)
    expected(llama.model, prompt_of(5), 4, streamer=theirs)
    assert [x.tolist() for x in ours.given] == [x.tolist() for x in theirs.given]
    assert len(ours.given) == 5 and ours.ended == theirs.ended == 1


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    signal.sigtimedwait([], 1.0)  # until it comes


def test_after_an_interrupt_it_writes_again(llama: LanguageModel) -> None:
    tokens = prompt_of(5)
    with pytest.raises(KeyboardInterrupt):
        llama.generate(tokens, 20, streamer=Kept(4, interrupt))
    calls = iter([None] * 9)

    def stops(ids: Tensor, scores: Tensor) -> Tensor:
        if next(calls, 0) == 0:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):  # while several are under way
        llama.generate([tokens, prompt_of(9), prompt_of(3)], 20, logits_processor=[stops])
    assert torch.equal(llama.generate(tokens, 6), expected(llama.model, tokens, 6))


@needs_two
@pytest.mark.usefixtures("in_shares")
def test_several_texts_on_two_devices_at_the_same_time() -> None:
    model = model_of("llama", num_hidden_layers=2)
    prompts = [prompt_of(n, seed=n) for n in (5, 9, 3, 17, 8, 4, 11)]
    events: list[str] = []
    with writer_of(model, cluster=["cpu:0", "cpu:1"], objective="period") as writer:
        assert writer.plan.devices_in_use == {"cpu:0", "cpu:1"} and writer.step.kept == "plan"
        stream = writer.step.stream

        def seen(loader: Iterator[Any], **options: Any) -> Iterator[Any]:
            def items() -> Iterator[Any]:
                for item in loader:
                    events.append("in")
                    yield item

            for result in stream(items(), **options):
                events.append("out")
                yield result

        writer.step.stream = seen
        stop = int(expected(model, prompts[0], 12)[0, 9])  # the first ends before the others
        texts = writer.generate(prompts, 12, stop=stop)
    for text, tokens in zip(texts, prompts, strict=True):
        own = expected(model, tokens, 12, eos_token_id=stop, pad_token_id=stop)
        assert torch.equal(text, own)
    assert texts[0].shape[1] < 17
    assert events[:5] == ["in"] * 4 + ["out"]  # four under way


@pytest.mark.usefixtures("in_shares")
def test_a_model_that_does_not_fit_on_the_gpu_has_its_weights_there_once() -> None:
    model = model_of("llama", num_hidden_layers=4, hidden_size=64)
    room = sum(x.nbytes for x in model.parameters()) * 9 // 10
    devices = Device("cpu:0"), Device("cuda:0", "cuda", memory_bytes=room)
    prompts = [prompt_of(n, seed=n) for n in (5, 9)]
    with (
        emulated_gpu.emulated(memory_bytes=room) as gpu,
        writer_of(model, cluster=Cluster("small", devices), context=16) as writer,
    ):
        used = {"cpu:0", "cuda:0", "streamed/cuda:0"}
        assert writer.plan.devices_in_use == used and writer.prompt.plan.devices_in_use == used
        for text, tokens in zip(writer.generate(prompts, 7), prompts, strict=True):
            assert torch.equal(text, expected(model, tokens, 7))
        loaded = writer.step.loaded, writer.prompt.loaded
        mine, others = ({id(v) for (on, _), v in x.items() if on.type == "cuda"} for x in loaded)
        assert mine and others <= mine
        assert gpu.peak[0] <= room and gpu.copies["pinned"] and not gpu.num_races


def test_keys_and_values_stay_where_a_step_left_them() -> None:
    """Predicted to be sent: the token, and how many were seen, a second each; so it is run."""
    model = model_of("llama", num_hidden_layers=2)
    inputs = generating._example(generating._empty_cache(model, 1, 16), 1)
    graph = generating._with_cache_back(capture(generating._Step(model).eval(), inputs))
    links = Link("cpu:0", "cuda:0", 1.0, 1e9), Link("cuda:0", "cpu:0", 1.0, 1e9)
    cluster = Cluster("both", (Device("cpu:0"), Device("cuda:0", "cuda")), links)
    seconds = np.full((graph.num_ops, 2), 1e-6)
    profile = Profile(cluster.device_names, seconds, 0 * seconds).for_cluster(cluster)
    problem = Problem(graph, cluster, profile, Objective.LATENCY)
    on_gpu = np.ones(graph.num_ops, np.int32)
    assert score(problem, on_gpu[None])[0] == pytest.approx(6.0, abs=1e-2)
    there = generating._with_cache_there(problem)
    assert score(there, on_gpu[None])[0] == pytest.approx(2.0, abs=1e-2)
    with emulated_gpu.emulated() as gpu, Runner(graph, cluster, on_gpu) as runner:
        runner.outputs_stay = True
        once, often = ways.calls(runner, runner, inputs, 3)
        once()
        gpu.copies.clear()
        once()
        assert gpu.copies.total() == 2
        often()
        assert gpu.copies.total() == 2 + 3 * 2


def test_what_was_written_to_the_model_shows(llama: LanguageModel) -> None:
    model, tokens = llama.model, prompt_of(5)
    before = llama.generate(tokens, 6)
    weight = model.lm_head.weight
    with torch.no_grad():
        weight.copy_(weight.flip(0))
        after = llama.generate(tokens, 6)
        assert torch.equal(after, expected(model, tokens, 6)) and not torch.equal(after, before)
        weight.copy_(weight.flip(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0: must be at least 1"),
        ({"max_new_tokens": -3}, "max_new_tokens = -3"),
        ({"max_new_tokens": 2.0}, "max_new_tokens = 2.0"),
        ({"tokens": prompt_of(33)}, "33 tokens.*the context is 32: .*context=35.*shorter text"),
        ({"max_new_tokens": 28}, "5 tokens and max_new_tokens = 28.*at most 27"),
        ({"tokens": prompt_of(5).float()}, "tokens is torch.float32: give torch.int64"),
        ({"tokens": [[1, 2, 3]]}, "text 0 is list: give torch.int64"),
        ({"tokens": "a text"}, "tokens is str"),
        ({"tokens": prompt_of(5)[0]}, r"shape \[5\], must be \[1, n\]"),
        ({"tokens": prompt_of(5, batch=2)}, r"shape \[2, 5\], must be \[1, n\].*batch="),
        ({"tokens": prompt_of(0)}, r"shape \[1, 0\]"),
        ({"tokens": [prompt_of(5), prompt_of(5) + 95]}, "text 1 holds token 1..: .* 0 to 99"),
        ({"tokens": prompt_of(5) - 100}, "holds token -"),
        ({"temperature": 0}, "temperature = 0: must be above 0"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0.0}, "top_p = 0.0: must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"top_k": 0}, "top_k = 0: must be a whole number of at least 1"),
        ({"seed": -1}, "seed = -1"),
        ({"stop": -1}, "stop = -1: give a token's number"),
        ({"stop": "."}, "stop = '.'"),
        ({"stop": [3, 1000]}, r"stop = \[3, 1000\]: the model has tokens 0 to 99, so 1000 never"),
        ({"tokens": [prompt_of(5)] * 2, "streamer": Kept()}, "a streamer shows one text, 2 are"),
    ],
)
def test_what_generate_refuses(llama: LanguageModel, options: Any, message: str) -> None:
    with pytest.raises(LanguageModelError, match=message) as error:
        llama.generate(**{"tokens": prompt_of(5), "max_new_tokens": 2, **options})
    assert "\n" not in str(error.value)


def other(kind: str, config: str, **facts: Any) -> Any:
    return getattr(transformers, kind)(getattr(transformers, config)(**facts)).eval()


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 100}
BERT = {**SIZES, "num_attention_heads": 4}
T5 = {"d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 4, "d_kv": 8, "vocab_size": 100}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 100, "state_size": 4}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), "a Linear is given, not a model of transformers"),
        (lambda: other("T5ForConditionalGeneration", "T5Config", **T5), "T5.* encoder-decoder"),
        (lambda: other("BertModel", "BertConfig", **BERT), "BertModel writes no text"),
        (lambda: other("BertLMHeadModel", "BertConfig", **BERT), "BertLMHeadModel "),
        (lambda: other("MambaForCausalLM", "MambaConfig", **MAMBA), "MambaForCausalLM keeps"),
        (lambda: model_of("llama").train(), "training mode: call model.eval"),
    ],
)
def test_models_that_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(LanguageModelError, match=message) as error:
        writer_of(make())
    assert "\n" not in str(error.value)


def test_sizes_that_are_refused(llama: LanguageModel) -> None:
    for sizes, message in (
        ({"batch": 0}, "batch = 0: must be a whole number of at least 1"),
        ({"context": 2.5}, "context = 2.5"),
        ({"chunk": 0}, "chunk = 0"),
        ({"context": 65}, "context = 65, but LlamaForCausalLM has places for 64"),
    ):
        with pytest.raises(LanguageModelError, match=message):
            writer_of(llama.model, **sizes)
