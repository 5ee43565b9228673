"""``config.json`` of Hugging Face as a decoder: the model of transformers, without its weights.

transformers builds the model on the device ``meta``, where tensors have shapes and no numbers, and
one token runs through it, and of layers that are alike through the first. The parameters of each
layer, the order of what is around the layers, and what each layer keeps of a token are therefore
the library's own. No code that comes with a model runs, and nothing is downloaded.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from placement.importers._read import FormatError, whole
from placement.importers.decoder import Decoder, Part
from placement.tools.clock import nothing_collected
from placement.tools.files import short
from placement.tools.limits import MOST
from placement.tools.ownership import needing

_BITS = {"fp16": 16.0, "bf16": 16.0, "fp32": 32.0}
_NAMES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
# Bits of a weight, and of what goes with a block of them.
_QUANTISED = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "nvfp4": 4.5, "bitsandbytes": 8.0}
_INNER, _DTYPES = ("text_config", "llm_config", "language_config"), ("dtype", "torch_dtype")
_OUTER = (*_DTYPES, "quantization_config", "tie_word_embeddings")  # said of all inside
# What transformers is not told: what is read here, and which code is to run.
_HELD_BACK = re.compile("model_type|quantization_config|auto_map|(torch_)?dtype|.*_implementation")
_SAME = {"kimi_k2": "deepseek_v3"}  # a name of its own for a type of transformers
# Names of lists.
_ALONE = ("modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules")
# Names of how many experts a token is routed to.
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")
_NUMBER = ("layer_idx", "layer_id", "layer_number")  # names of which layer a module is in
# Names within a layer.
_FEED_FORWARD = re.compile(r"((shared_)?mlp|(\w+_)?moe|ffn?|feed_forward|mlp_block|fc\d)\.")
_ROUTER = re.compile(r"(^|\.)((\w+_)?gate|(\w+_)?router(\.layer)?)\.weight$")
_CACHES = {"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer",
           "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer",
           "LinearAttentionAndSlidingWindowAttentionLayer"}  # fmt: skip


def looks_like(data: Any) -> bool:
    """Whether a JSON value is a model's config: it names its type."""
    return isinstance(data, dict) and isinstance(data.get("model_type"), str)


# Imports make a million objects that stay: passes over them are a fifth of what they take.
@nothing_collected()
def read(data: Mapping[str, Any], path: str, name: str) -> Decoder:
    """The decoder that a config describes; of a config that holds another one's, the text model.

    Tensors are of the type that the config names, float16 where it names none; matrices of the
    layers have the bits of its ``quantization_config``. A number that is left out is the one that
    transformers takes. A recurrent layer (Mamba, linear attention, short convolution) keeps its
    state once, whatever the context: ``kv_bytes`` are those of the state, ``window`` is 1. Of a
    layer that keeps both keys and a state, the recurrent half is a part of its own.

    Raises:
        FormatError: transformers is missing, does not know the architecture (as types that only
            code beside the weights defines), or cannot build it of these numbers.
    """
    what = f"{path}: reading a config.json needs the package transformers"
    with needing("models", what, FormatError, "; a GGUF file needs nothing"):
        from transformers import CONFIG_MAPPING
    inner: Any = next((data[k] for k in _INNER if k in data), None)
    inside = looks_like(inner) and _type(inner) in CONFIG_MAPPING
    if inside:
        data = {k: data[k] for k in _OUTER if k in data} | inner
    kind = _type(data)
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind[:60], CONFIG_MAPPING, 3, 0.5)
        meant = f"; did you mean {', '.join(near)}?" if near else "."
        raise FormatError(
            f"{path}: the architecture {short(kind)} is not known{meant} The transformers that is "
            "installed does not have it, and code that comes with a model is not run"
        )
    for key, value in data.items():
        if re.search("(^|_)num(ber)?_|layers?$|experts?$", key) and type(value) is int:
            most = MOST.run_layers if re.search("layers?$", key) else MOST.layers
            whole(value, f"{path}: {key}", -1, most)  # of each there is an object
    weights = _Weights(data, path)
    try:
        with _quiet():
            model = _Model(_fields(data), kind, weights)
            parts, widest = tuple(model.parts()), model.widest()
            hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
    except FormatError:
        raise
    except Exception as error:  # whatever transformers and torch raise of numbers that cannot be
        reason = " ".join(str(error).split()) or type(error).__name__
        raise FormatError(
            f"{path}: no {kind} can be run with these numbers: {reason[:300]}"
        ) from error
    if sum(part.weight_bytes + part.kv_bytes for part in parts) > MOST.model_bytes:
        raise FormatError(f"{path}: a model of these numbers is larger than any memory")
    source = "text_config" if inside else "config.json"
    return Decoder(name, parts, hidden, widest, vocabulary, weights.dtype, source)


def _type(data: Mapping[str, Any]) -> str:
    return _SAME.get(data["model_type"], data["model_type"])


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers is told; it writes ``{"__float__": "Infinity"}`` for an infinite float."""

    def special(x: dict[str, Any]) -> Any:
        return float(x["__float__"]) if set(x) == {"__float__"} else x

    text = json.dumps({k: v for k, v in data.items() if not _HELD_BACK.fullmatch(k)})
    return json.loads(text, object_hook=special)  # type: ignore[no-any-return]


@contextmanager
def _quiet() -> Iterator[None]:
    """Within it transformers does not speak of kernels that it lacks, nor fetch any."""
    from transformers.integrations import hub_kernels
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with mock.patch.object(hub_kernels, "_kernels_enabled", False, create=True):
            yield
    finally:
        logging.set_verbosity(level)


Named = list[tuple[str, Any]]  # parameters, with names within their layer


class _Kept(NamedTuple):
    """What a layer keeps: bytes, of each token within ``window``.

    ``width``, ``heads``, ``kv_heads``: see ``Part``. ``made``: numbers of queries, keys and values
    of a token.
    """

    bytes: int
    window: int | None
    width: float = 0.0
    heads: int = 0
    kv_heads: int = 0
    made: int = 0


class _Model:
    """A model on ``meta``, and what the run of a token told.

    Attributes:
        config: of the text model.
        before, behind: paths of the modules around the layers that have parameters, as they ran.
        kept: of each layer, of its keys and values, and of its state.
        layers: parameters of each layer by what reads them: attention, recurrent, feed_forward,
            experts.
    """

    def __init__(self, fields: Mapping[str, Any], kind: str, weights: _Weights) -> None:
        import transformers

        self.weights = weights
        config = transformers.CONFIG_MAPPING[kind](**fields)
        self.config = config = config.get_text_config(decoder=True)
        if (getattr(config, "pad_token_id", None) or 0) >= config.vocab_size:
            config.pad_token_id = None  # of the usual vocabulary, which is larger than this one
        if vars(config).get("head_dim", 0) is None:
            config.head_dim = config.hidden_size // config.num_attention_heads
        if not hasattr(config, "tie_word_embeddings"):
            config.tie_word_embeddings = fields.get("tie_word_embeddings", False)
        self.module, called = _on_meta(config, weights.dtype)
        modules = dict(self.module.named_modules())
        lists = [(name, x) for name, x in modules.items() if type(x).__name__ == "ModuleList"]
        lists = [(name, x) for name, x in lists if len(x) == config.num_hidden_layers > 0]
        if not lists:
            raise ValueError("it has no list of its layers")
        self.path, layers = lists[0]
        inside, first = f"{self.path}.", f"{self.path}.0"
        around = [name for name, x in modules.items() if x._parameters]
        around = [name for name in around if not name.startswith(inside)]
        alike = _alike(layers, getattr(config, "layer_types", None))
        watched = {name: modules[name] for name in (first, *around)}
        ran, caches = _run(called, layers, watched, alike)
        cache = [caches[i] for i in alike if i < len(caches)]
        if len(cache) != len(layers) or not {type(x).__name__ for x in cache} <= _CACHES:
            raise ValueError("what its layers keep of a token is not known")
        self.before = ran[: ran.index(first)]
        self.behind = [x for x in dict.fromkeys([*ran, *around]) if x not in (first, *self.before)]
        self.kept = [(_keys(x, config), _state(x)) for x in cache]
        if not any(map(any, self.kept)):
            raise ValueError("its layers keep nothing of a token: it is no decoder")
        self.layers = [_groups(x, all(kept)) for x, kept in zip(layers, self.kept, strict=True)]
        named = list(self.module.named_parameters(remove_duplicate=False))
        self.name_of = {id(p): name for name, p in reversed(named)}
        self.uses = Counter(id(p) for name, p in named if name.startswith(inside))

    def parts(self) -> Iterator[Part]:
        """Embedding, layers and head."""
        for name in self.before:
            yield self._around(name, "embedding", -1)
        for i, (groups, (keys, state)) in enumerate(zip(self.layers, self.kept, strict=True)):
            path = f"{self.path}.{i}"
            for group, named in groups.items():
                name = "router" if group == "feed_forward" and "experts" in groups else group
                kind = {"router": "feed_forward", "recurrent": "attention"}.get(name, name)
                kept = {"attention": keys or state, "recurrent": state}.get(group)
                count = len(named[0][1]) if group == "experts" else 0
                used = self._chosen(named) / count if count else 1.0
                numel = float(sum(p.numel() for n, p in named if _is_matrix(n, p)))
                sizes = self._sizes(f"{path}.{name}", path, named)
                held = kept or _Kept(0, None)
                own = numel, used, held.bytes, held.window, held.width, count
                yield Part(
                    f"{path}.{name}", kind, path, i, sizes, *own,
                    heads=held.heads, kv_heads=held.kv_heads,
                )  # fmt: skip
        for name in self.behind:
            yield self._around(name, "head", -2)

    def _around(self, name: str, kind: str, layer: int) -> Part:
        """A module before or behind the layers; those before them look tokens up."""
        own = [p for p in self.module.get_submodule(name)._parameters.values() if p is not None]
        sizes = {self.name_of[id(p)]: int(p.numel() * self.weights.plain / 8) for p in own}
        numel = sum(p.numel() for p in own if p.dim() > 1) if kind == "head" else 0
        return Part(name, kind, name, layer, sizes, float(numel))

    def _sizes(self, own: str, path: str, named: Named) -> dict[str, int]:
        """Bytes: of tensors that several layers share by their names, of others together."""
        bits: dict[str, float] = {}
        for name, p in named:
            key = own if self.uses[id(p)] == 1 else self.name_of[id(p)]
            quantised = _is_matrix(name, p) and not _ROUTER.search(name)
            one = self.weights.bits(f"{path}.{name}") if quantised else self.weights.plain
            bits[key] = bits.get(key, 0.0) + p.numel() * one
        return {key: int(size / 8) for key, size in bits.items()}

    def _chosen(self, experts: Named) -> int:
        """Experts of a token."""
        value = next((x for k in _CHOSEN if (x := getattr(self.config, k, None)) is not None), None)
        return whole(value, f"{self.weights.path}: num_experts_per_tok", 1, len(experts[0][1]))

    def widest(self) -> int:
        """See ``Decoder.widest``."""
        hidden, most = self.config.hidden_size, 0

        def made(named: Named) -> int:
            return sum(p.numel() for n, p in named if _is_matrix(n, p)) // hidden

        for groups, (keys, _) in zip(self.layers, self.kept, strict=True):
            dense = [x for x in groups.get("feed_forward", ()) if not _ROUTER.search(x[0])]
            most = max(most, made(dense), keys.made if keys else 0)
            if experts := groups.get("experts"):
                down = [x for x in experts if "down_proj" in x[0]]
                both, one = made(experts), made(down) + hidden * len(experts[0][1])
                most = max(most, self._chosen(experts) * max(both, one) // len(experts[0][1]))
        return 5 * hidden + most


def _on_meta(config: Any, dtype: str) -> tuple[Any, Any]:
    """A causal language model, and the module of it that takes tokens."""
    import torch
    import transformers

    number = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    how: dict[str, Any] = {"dtype": number, "attn_implementation": "eager"}
    with torch.device("meta"):
        if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            called = model = transformers.AutoModelForCausalLM.from_config(config, **how)
        else:  # the text model of a larger one, which has the head
            called = transformers.AutoModel.from_config(config, **how)
            head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=number)
            if config.tie_word_embeddings:
                head.weight = called.get_input_embeddings().weight
            model = torch.nn.ModuleDict({"model": called, "lm_head": head})
    called.config._experts_implementation = "batched_mm"  # the others' shapes depend on numbers
    return model.eval(), called


def _alike(layers: Sequence[Any], types: Sequence[str] | None) -> list[int]:
    """Of each layer, the first that is like it in all but its number."""
    first: dict[Any, int] = {}
    return [
        first.setdefault((types[i] if types else None, *_look(layer)), i)
        for i, layer in enumerate(layers)
    ]


def _look(layer: Any) -> Iterator[Any]:
    """Names and shapes of the parameters of a layer, and the plain settings of its modules."""
    for name, p in layer.named_parameters():
        yield name, *p.shape
    for name, module in layer.named_modules():
        settings = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str)}
        yield name, type(module), *sorted((settings | dict.fromkeys(_NUMBER, "")).items(), key=str)


def _run(
    model: Any, layers: Sequence[Any], modules: Mapping[str, Any], alike: Sequence[int]
) -> tuple[list[str], Sequence[Any]]:
    """In which order these modules run, and the caches of the layers after one token.

    Of layers that are ``alike`` the first one runs, and the others return what it did.
    """
    import torch

    ran: dict[str, None] = {}
    made: dict[int, Any] = {}
    for i, (layer, first) in enumerate(zip(layers, alike, strict=True)):
        if i == first:
            layer.register_forward_hook(lambda *told, i=i: made.__setitem__(i, told[2]))
        else:
            layer.forward = lambda *_, first=first, **__: made[first]
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda *_, name=name: ran.setdefault(name))
    with torch.no_grad():
        out = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device="meta"), use_cache=True)
    caches = [getattr(out, name, None) for name in ("past_key_values", "cache_params")]
    each: list[Any] = [getattr(x, "layers", None) for x in caches]
    return list(ran), next((x for x in each if x is not None), ())


def _keys(cache: Any, config: Any) -> _Kept | None:
    """Of a layer of attention: keys and values of each token."""
    names = "keys", "values", "indexer_keys"
    tensors = [x for name in names if (x := getattr(cache, name, None)) is not None]
    if not tensors:
        return None
    copies, length, key = tensors[0].shape[1:]
    count = min(copies, getattr(config, "num_kv_heads", copies))  # Falcon's cache repeats heads
    value, heads = tensors[1].shape[3], config.num_attention_heads
    size = sum(x.numel() * x.element_size() for x in tensors) // length * count // copies
    window, rank = getattr(cache, "sliding_window", None), getattr(config, "kv_lora_rank", None)
    if rank != key or count != 1:
        made = heads * key + count * (key + value)
        return _Kept(size, window, heads * (key + value) / 2, heads, count, made)
    # Latent attention (DeepSeek-AI, arXiv:2405.04434) keeps a vector, which is key and value, and
    # a part of the key.
    made = 2 * config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return _Kept(size, window, heads * (rank + value / 2), heads, 1, heads * made)


def _state(cache: Any) -> _Kept | None:
    """Of a recurrent layer: its state, once."""
    states = [getattr(cache, name, {}).values() for name in ("conv_states", "recurrent_states")]
    size = sum(x.numel() * x.element_size() for xs in states for x in xs if x is not None)
    return _Kept(size, 1) if size else None


def _groups(layer: Any, both: bool) -> dict[str, Named]:
    """Parameters by what reads them; ``both``: the layer keeps keys and a state."""
    groups: dict[str, Named] = {"attention": [], "recurrent": [], "feed_forward": [], "experts": []}
    for name, p in layer.named_parameters():
        group = "recurrent" if both and "mamba" in name else "attention"
        group = "feed_forward" if _FEED_FORWARD.match(name) else group
        groups["experts" if ".experts." in f".{name}" else group].append((name, p))
    if both and not groups["recurrent"]:
        raise ValueError("a layer keeps keys and a state in one module")
    return {group: named for group, named in groups.items() if named}


def _is_matrix(name: str, p: Any) -> bool:
    """Whether a token is multiplied with it."""
    return p.dim() > 1 and not name.endswith("bias") and "norm" not in name


class _Weights:
    """How a config's numbers are stored: ``dtype``, and ``plain`` bits of one."""

    def __init__(self, data: Mapping[str, Any], path: str) -> None:
        self.path = path
        value = next((data[k] for k in _DTYPES if data.get(k) is not None), "float16")
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if not isinstance(name, str) or name not in _NAMES:
            raise FormatError(
                f"{path}: dtype = {short(value)} is none of {', '.join(sorted(_NAMES))}"
            )
        self.dtype = _NAMES[name]
        self.plain = _BITS[self.dtype]
        settings = data.get("quantization_config")
        self.settings: Mapping[str, Any] = settings if isinstance(settings, dict) else {}
        self.quantised = self.plain if settings is None else self._quantised(settings)
        # Of each pattern of modules that are not quantised, what the name of one has in it.
        lists = [x for x in map(self.settings.get, _ALONE) if isinstance(x, list)]
        patterns = [str(x).replace("language_model.", "") for names in lists for x in names]
        pieces = [x.removeprefix("re:").replace("\\", "").split("*") for x in patterns]
        self.alone = [kept for x in pieces if any(kept := [piece.strip(".^$") for piece in x])]

    def bits(self, name: str) -> float:
        """Of a weight of a layer's matrix, and what goes with a block of them."""
        if self.settings.get("quant_method") == "mxfp4" and ".experts." not in name:
            return self.plain  # transformers quantises experts alone
        alone = any(all(f"{x}." in f"{name}." for x in pieces) for pieces in self.alone)
        return self.plain if alone else self.quantised

    def _quantised(self, settings: Any) -> float:
        where, known = f"{self.path}: quantization_config", self.settings
        method = known.get("quant_method")
        method = method if isinstance(method, str) else ""
        if method == "compressed-tensors":
            groups = known.get("config_groups")
            first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
            weights = first.get("weights") if isinstance(first, dict) else None
            known = weights if isinstance(weights, dict) else {}
        if method in ("gptq", "awq", "auto-round", "compressed-tensors"):
            names = ("num_bits", "group_size") if method[0] == "c" else ("bits", "group_size")
            bits = whole(known.get(names[0]), f"{where}: {names[0]}", 1, 16)
            default = 0 if method[0] == "c" else 128
            group = known.get("group_size")
            group = default if group is None else group
            group = whole(group, f"{where}: group_size", -1, MOST.quantized)
            # A scale, and where numbers are whole a zero point; of small floats a scale of 8 bits.
            beside = 8 if known.get("type") == "float" else 16 + bits
            return bits + beside / group if group > 0 else float(bits)
        if method == "bitsandbytes" and known.get("load_in_4bit") is True:
            return 4.5  # and a scale of 32 bits for each 64 numbers
        if method == "modelopt":
            method = str(known.get("quant_algo")).lower()
        if method in _QUANTISED:
            return _QUANTISED[method]
        raise FormatError(
            f"{where} = {short(settings)}: bits are known of gptq, awq, auto-round, "
            f"compressed-tensors and {', '.join(_QUANTISED)}; a GGUF file says them of every tensor"
        )
