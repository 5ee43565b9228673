"""``config.json`` of Hugging Face as a decoder: numbers alone, no code, no weights, no download."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from placement.importers._read import FormatError, whole
from placement.importers.decoder import CLASSES, MOST_EXPERTS, MOST_LAYERS, Decoder, Part
from placement.tools.files import short

# Flags of norms of queries and keys, all heads; of a head, whether they are usual, and their size.
_NORMED = {"cohere": "use_qk_norm", "stablelm": "qk_layernorm"}
_NORMED_HEAD = {"glm4_moe": ("use_qk_norm", False, 2), "phi": ("qk_layernorm", False, 4),
                "persimmon": ("qk_layernorm", True, 4)}  # fmt: skip
_ALONE = ("modules_to_not_convert", "ignore", "ignored_layers")  # names of lists
_MOST = 2**24  # of a size
_BITS = {"fp16": 16.0, "bf16": 16.0, "fp32": 32.0}
_NAMES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
# Bits of a weight, and of what goes with a block of them.
_QUANTISED = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25, "nvfp4": 4.5, "bitsandbytes": 8.0}


@dataclass(frozen=True)
class Family:
    """What models of a type have that their numbers do not say.

    ``bias``: which projections have one: ``q`` queries, keys and values, ``o`` the attention's
    output, ``m`` the feed-forward, ``h`` the head; upper case: unless the config says otherwise.
    ``norm``: normalisations of a layer, and numbers that each has for one of the token;
    ``qk``: of queries and keys, over a head or over all. ``positions``: learned ones, and how many
    more than stated.
    """

    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    final: str = "model.norm"
    head: str = "lm_head"
    gated: bool = True
    bias: str = ""
    norms: int = 2
    norm_size: int = 1
    qk: str = ""
    tied: bool = False
    positions: tuple[str, int] | None = None


def _gpt(embed: str = "transformer.wte", layers: str = "transformer.h", **more: Any) -> Family:
    common: dict[str, Any] = {"final": "transformer.ln_f", "gated": False, "norm_size": 2}
    return Family(layers, embed, **{**common, "tied": True, **more})


_WPE = ("transformer.wpe", 0)
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "ministral", "ministral3", "phi3", "helium"), Family()),
    **dict.fromkeys(("granite", "internlm3", "mixtral", "granitemoe", "deepseek_v2"), Family()),
    **dict.fromkeys(("deepseek_v3", "solar_open", "dots1", "glm4_moe", "baichuan"), Family()),
    "llama4_text": Family(),
    "internlm2": Family(embed="model.tok_embeddings", head="output"),
    "exaone": Family("transformer.h", "transformer.wte", "transformer.ln_f"),
    **dict.fromkeys(("gemma", "smollm3", "ernie4_5", "ernie4_5_moe", "minicpm"), Family(tied=True)),
    "gemma2": Family(norms=4, tied=True),
    "gemma3_text": Family(norms=4, tied=True, qk="head"),
    "qwen2": Family(bias="q"),
    "qwen2_moe": Family(bias="Q"),
    **dict.fromkeys(("qwen3", "qwen3_moe", "exaone4", "hunyuan_v1_dense"), Family(qk="head")),
    **dict.fromkeys(("olmo2", "olmo3", "olmoe", "minimax_m2"), Family(qk="all")),
    "olmo": Family(norms=0),
    **dict.fromkeys(("cohere", "cohere2"), Family(norms=1, tied=True)),
    **dict.fromkeys(("seed_oss", "glm"), Family(bias="Q")),
    **dict.fromkeys(("glm4", "glm4v_text"), Family(bias="Q", norms=4)),
    "arcee": Family(gated=False),
    "nemotron": Family(gated=False, norm_size=2),
    "apertus": Family(gated=False, qk="head"),
    "starcoder2": Family(gated=False, bias="QOM", norm_size=2, tied=True),
    "stablelm": Family(norm_size=2),
    "phimoe": Family(norm_size=2),
    "gpt_oss": Family(bias="QOm"),
    "phi": Family(final="model.final_layernorm", gated=False, bias="qomh", norms=1, norm_size=2),
    "persimmon": Family(final="model.final_layernorm", gated=False, bias="qom", norm_size=2),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _gpt(bias="qom", positions=_WPE)),
    "gpt_neo": _gpt(bias="om", positions=_WPE),
    **dict.fromkeys(("gptj", "codegen"), _gpt(bias="mh", norms=1, tied=False)),
    "gpt_neox": _gpt("gpt_neox.embed_in", "gpt_neox.layers", final="gpt_neox.final_layer_norm",
                     bias="QOm", tied=False),
    "opt": _gpt("model.decoder.embed_tokens", "model.decoder.layers", bias="QOM",
                final="model.decoder.final_layer_norm",
                positions=("model.decoder.embed_positions", 2)),
    "bloom": _gpt("transformer.word_embeddings", bias="qom"),
    "falcon": _gpt("transformer.word_embeddings", norms=1),
    "mpt": _gpt(layers="transformer.blocks", final="transformer.norm_f", norm_size=1),
}  # fmt: skip
# Types that are another one in all that counts here: also text models of those that see.
_SAME = {"kimi_k2": "deepseek_v3", "gpt-sw3": "gpt2", "cwm": "llama",
         "glm4v_moe_text": "glm4_moe", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe",
         **dict.fromkeys(("qwen2_vl", "qwen2_vl_text"), "qwen2"),
         **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_text"), "qwen2")}  # fmt: skip


def looks_like(data: Any) -> bool:
    """Whether a JSON value is a model's config: it names its type."""
    return isinstance(data, dict) and isinstance(data.get("model_type"), str)


def read(data: Mapping[str, Any], path: str, name: str) -> Decoder:
    """The decoder that a config describes; of a config that holds another one's, the text model.

    Tensors are of the type that the config names, float16 where it names none; matrices of the
    layers have the bits of its ``quantization_config``.

    Raises:
        FormatError: an architecture that is not known, or a number that is missing or cannot be.
    """
    inner, inside = next((data[k] for k in _INNER if k in data), None), False
    if isinstance(inner, dict) and looks_like(inner) and _type(inner) in FAMILIES:
        outer = {k: data[k] for k in (*_DTYPES, "quantization_config") if k in data}
        data, inside = {**outer, **inner}, True
    kind = _type(data)
    skipped = 0 if inside else 4  # a model's own config tells its size
    usual = zip(_USUAL_FIELDS, _USUAL.get(data["model_type"], ()), strict=False)
    data = {**dict(islice(usual, skipped, None)), **data}
    if kind not in FAMILIES:
        near = difflib.get_close_matches(kind, FAMILIES, 3, 0.5)
        meant = f"; did you mean {', '.join(near)}?" if near else "."
        raise FormatError(
            f"{path}: the architecture {short(kind)} is not known{meant} Known are "
            f"{', '.join(sorted({*FAMILIES, *_SAME}))}"
        )
    config = _Config(data, path, FAMILIES[kind], kind)
    parts = tuple(config.parts())
    source = "text_config" if inside else "config.json"
    return Decoder(
        name, parts, config.hidden, config.widest, config.vocabulary, config.dtype, source
    )


def _type(data: Mapping[str, Any]) -> str:
    return _SAME.get(data["model_type"], data["model_type"])


_INNER, _DTYPES = ("text_config", "llm_config", "language_config"), ("dtype", "torch_dtype")
_USUAL_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("intermediate_size", "num_key_value_heads", "head_dim", "sliding_window"),
)
# What transformers takes for what is left out, because it is the type's default.
_USUAL = {
    "llama": (4096, 32, 32, 32000, 11008),
    "mistral": (4096, 32, 32, 32000, 14336, 8, None, 4096),
    "mixtral": (4096, 32, 32, 32000, 14336, 8),
    "ministral3": (4096, 34, 32, 131072, 14336, 8, 128),
    "qwen2": (4096, 32, 32, 151936, 22016, 32),
    "qwen3": (4096, 32, 32, 151936, 22016, 32, 128),
    "gemma": (3072, 28, 16, 256000, 24576, 16, 256),
    "gemma2": (2304, 26, 8, 256000, 9216, 4, 256, 4096),
    "gemma3_text": (2304, 26, 8, 262208, 9216, 4, 256, 4096),
    "phi3": (3072, 32, 32, 32064, 8192),
    "granite": (4096, 32, 32, 32000, 11008),
    "cohere2": (8192, 40, 64, 256000, 22528, None, None, 4096),
    "gpt_oss": (2880, 36, 64, 201088, 2880, 8, 64, 128),
    "llama4_text": (5120, 48, 40, 202048, 8192, 8, 128),
}
# Of other types what must be told, as their default follows from no other number.
_MUST = {
    "num_key_value_heads": (
        "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "glm", "glm4", "glm4v_text", "glm4_moe",
        "helium", "internlm3", "minimax_m2", "ministral", "phimoe", "qwen2_moe", "qwen3_moe",
        "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
    ),
    "sliding_window": ("exaone4", "ministral", "olmo3"),
    "head_dim": ("ernie4_5", "glm", "glm4", "helium", "internlm3", "minimax_m2", "seed_oss",
                 "solar_open"),
    "moe_intermediate_size": ("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe",
                              "qwen2_moe", "qwen3_moe", "solar_open"),
    "n_shared_experts": ("deepseek_v2", "deepseek_v3", "glm4_moe", "solar_open"),
    "first_k_dense_replace": ("deepseek_v3", "glm4_moe"),
    "q_lora_rank": ("deepseek_v2", "deepseek_v3"),
    "shared_expert_intermediate_size": ("qwen2_moe",),
    "moe_num_shared_experts": ("ernie4_5_moe",),
    "moe_layer_start_index": ("ernie4_5_moe",),
}  # fmt: skip


class _Config:
    """The numbers of a config, checked, whatever it calls them."""

    def __init__(self, data: Mapping[str, Any], path: str, family: Family, kind: str) -> None:
        self.data, self.path, self.family, self.kind = data, path, family, kind
        settings = data.get("quantization_config")
        self.settings: Mapping[str, Any] = settings if isinstance(settings, dict) else {}
        for name, kinds in _MUST.items():
            if kind in kinds and name not in data:
                raise FormatError(f"{path}: field {name!r} is missing ({kind})")
        self.hidden = self.size("hidden_size", "n_embed", "n_embd", "d_model")
        most = self.number("num_hidden_layers", "n_layer", "n_layers", "num_layers", low=1)
        if most > MOST_LAYERS:
            raise FormatError(f"{path}: {most} layers, at most {MOST_LAYERS} are possible")
        self.num_layers = most
        self.heads = self.size("num_attention_heads", "n_head", "n_heads", "num_heads")
        self.kv_heads = self._kv_heads()
        self.head_dim = self.size("head_dim", default=max(1, self.hidden // self.heads))
        self.vocabulary = self.size("vocab_size")
        usual = ("transformer." in family.embed and not family.gated) or kind == "solar_open"
        inner = self.size(
            *("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
            default=4 * self.hidden if usual else None,
        )
        if kind == "llama4_text":
            self.expert_width, inner = inner, self.size("intermediate_size_mlp", default=inner)
        else:
            self.expert_width = self.size("moe_intermediate_size", default=inner)
        self.inner = inner
        self.num_experts = self.chosen = 0
        if kind in _SPARSE:
            names = "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"
            none = 0 if any(name in data for name in names) else None
            self.num_experts = self.number(*names, default=none)
        if self.num_experts:
            self.chosen = self.number("num_experts_per_tok", "moe_k")
            if self.num_experts > MOST_EXPERTS:
                raise FormatError(f"{path}: {self.num_experts} experts, at most {MOST_EXPERTS}")
            if not 1 <= self.chosen <= self.num_experts:
                raise FormatError(
                    f"{path}: {self.chosen} of {self.num_experts} experts cannot be chosen"
                )
        self.tied = self.flag("tie_word_embeddings", family.tied)
        self.dtype = self._dtype()
        self.bits, self.left_alone = self._quantised_bits(), self._left_alone()
        self.latent = kind in ("deepseek_v2", "deepseek_v3")
        width, both = self.expert_width, 3 if family.gated else 2
        routed = self.chosen * max(both * width, width + self.hidden) if self.num_experts else 0
        self.widest = 5 * self.hidden + max(self.attention_width(), both * self.inner, routed)

    def number(self, *names: str, default: int | None = None, low: int = 0) -> int:
        """The first of these fields that is there.

        Raises:
            FormatError: none is, or it is no whole number of at least ``low``.
        """
        for name in names:
            if self.data.get(name) is not None:
                return whole(self.data[name], f"{self.path}: {name}", low, _MOST)
        if default is None:
            missing = " or ".join(map(repr, names))
            raise FormatError(f"{self.path}: field {missing} is missing ({self.kind})")
        return default

    def size(self, *names: str, default: int | None = None) -> int:
        """A number that is at least 1."""
        return self.number(*names, default=default, low=1)

    def flag(self, name: str, default: bool) -> bool:
        """A field that is true or false.

        Raises:
            FormatError: it is neither.
        """
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise FormatError(f"{self.path}: {name} = {short(value)} must be true or false")
        return value

    def bias(self, letter: str) -> bool:
        """Whether these projections have one; see ``Family``."""
        says = (f for f, letters, kinds in _BIASES if letter in letters and self.kind in kinds)
        usual = letter.upper() in self.family.bias
        return letter in self.family.bias or self.flag(next(says, ""), usual)

    def _kv_heads(self) -> int:
        if self.kind == "falcon" and not self.flag("new_decoder_architecture", False):
            return 1 if self.flag("multi_query", True) else self.heads
        if self.kind == "gpt_bigcode":
            return 1 if self.flag("multi_query", True) else self.heads
        return self.size("num_key_value_heads", "num_kv_heads", default=self.heads)

    def _dtype(self) -> str:
        value = next((self.data[k] for k in _DTYPES if self.data.get(k) is not None), "float16")
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if not isinstance(name, str) or name not in _NAMES:
            raise FormatError(
                f"{self.path}: dtype = {short(value)} is none of {', '.join(sorted(_NAMES))}"
            )
        return _NAMES[name]

    def _quantised_bits(self) -> float:
        """Of a weight of the layers' matrices, and what goes with a block of them."""
        settings = self.data.get("quantization_config")
        if settings is None:
            return _BITS[self.dtype]
        where = f"{self.path}: quantization_config"
        known = self.settings
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
            group = whole(default if group is None else group, f"{where}: group_size", -1, _MOST)
            return bits + (16 + bits) / group if group > 0 else float(bits)
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

    def _bits(self, module: str) -> float:
        """Of a weight of a module's matrix: as they all have, or those that are left alone."""
        if self.settings.get("quant_method") == "mxfp4" and ".experts." not in module:
            return _BITS[self.dtype]  # transformers quantises experts alone
        plain = any(all(piece in module for piece in pieces) for pieces in self.left_alone)
        return _BITS[self.dtype] if plain else self.bits

    def _left_alone(self) -> list[list[str]]:
        """Of each pattern of modules that are not quantised what a name of one has in it."""
        lists = [x for x in map(self.settings.get, _ALONE) if isinstance(x, list)]
        patterns = [str(x).replace("language_model.", "") for names in lists for x in names]
        split = [
            [piece.strip(".\\") for piece in pattern.removeprefix("re:").split("*")]
            for pattern in patterns
        ]
        return [pieces for pieces in split if any(pieces)]

    def attention_width(self) -> int:
        """Numbers of the queries of a token, and of its keys and values."""
        if self.latent:
            nope, rope, value = self._latent_dims()
            return self.heads * (2 * nope + rope + value)
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def _latent_dims(self) -> tuple[int, int, int]:
        return (
            self.size("qk_nope_head_dim", default=128),
            self.size("qk_rope_head_dim", default=64),
            self.size("v_head_dim", default=128),
        )

    def parts(self) -> Iterator[Part]:
        """Embedding, layers and head."""
        family, hidden, inner = self.family, self.hidden, self.hidden
        size = _BITS[self.dtype] / 8

        def plain(module: str, kind: str, count: int, numel: float = 0.0) -> Part:
            layer = -1 if kind == "embedding" else -2
            return Part(module, kind, module, layer, {f"{module}.weight": int(count * size)}, numel)

        if self.kind == "opt":  # small ones embed in fewer numbers, and project these
            inner = self.size("word_embed_proj_dim", default=hidden)
        project = hidden * inner if inner != hidden else 0
        yield plain(family.embed, "embedding", self.vocabulary * inner)
        if project:
            yield plain("model.decoder.project_in", "embedding", project)
        if family.positions is not None:
            module, more = family.positions
            count = self.size("n_positions", "max_position_embeddings") + more
            yield plain(module, "embedding", count * hidden)
        if self.kind == "bloom":
            yield plain(f"{family.embed}_layernorm", "embedding", 2 * hidden)
        for i in range(self.num_layers):
            yield from self._layer(i)
        removed = self.flag("_remove_final_layer_norm", False)
        if family.norms and self.flag("do_layer_norm_before", True) and not removed:
            yield plain(family.final, "head", hidden * family.norm_size)
        if project:
            yield plain("model.decoder.project_out", "head", project, float(project))
        name = f"{family.embed if self.tied else family.head}.weight"
        weights = {name: int(self.vocabulary * inner * size)}
        if self.bias("h"):
            weights[f"{family.head}.bias"] = int(self.vocabulary * size)
        numel = float(self.vocabulary * inner)
        yield Part(family.head, "head", family.head, -2, weights, numel)

    def _layer(self, i: int) -> Iterator[Part]:
        path, hidden, plain = f"{self.family.layers}.{i}", self.hidden, _BITS[self.dtype] / 8
        norms = self.family.norms * self.family.norm_size * hidden
        if self.kind == "falcon" and self.flag("new_decoder_architecture", False):
            norms *= 2
        if self.kind == "falcon" and not self.flag("parallel_attn", True):
            norms *= 2
        if self.kind == "stablelm" and self.flag("use_parallel_residual", False):
            norms //= 2
        name, usual, size = _NORMED_HEAD.get(self.kind, ("", self.family.qk == "head", 2))
        qk = size * self.head_dim if self.flag(name, usual) else 0
        if self.family.qk == "all" or self.flag(_NORMED.get(self.kind, ""), False):
            qk = (self.heads + self.kv_heads) * self.head_dim

        def part(name: str, module: str, matrices: int, others: int, **more: Any) -> Part:
            """``matrices`` have the bits of a ``module``; ``others`` are never quantised."""
            size = matrices * self._bits(f"{path}.{module}") / 8 + others * plain
            kind = name if name in CLASSES else "feed_forward"
            more = {"numel": float(matrices)} | more
            return Part(f"{path}.{name}", kind, path, i, {f"{path}.{name}": int(size)}, **more)

        matrices, biases, kv, width = self._attention()
        held = {"kv_bytes": kv, "window": self._window(i), "width": float(width)}
        yield part("attention", "self_attn.q_proj", matrices, biases + norms + qk, **held)
        one = (3 if self.family.gated else 2) * hidden
        bias = self.inner * (2 if self.family.gated else 1) + hidden if self.bias("m") else 0
        if not self._is_sparse(i):
            bias += 2 * (self.kind == "apertus")  # of its activation
            yield part("feed_forward", "mlp.up_proj", one * self.inner, bias)
            return
        shared, gate = self._shared_width() * one, self.num_experts * hidden
        gate += {"qwen2_moe": hidden, "ernie4_5_moe": self.num_experts}.get(self.kind, 0)
        experts = self.num_experts * one * self.expert_width
        bias = self.num_experts * (2 * self.expert_width + hidden + 1) if self.bias("m") else 0
        numel, used = float(shared + gate), self.chosen / self.num_experts
        yield part("router", "mlp.shared_experts.up_proj", shared, gate, numel=numel)
        yield part("experts", "mlp.experts.0.up_proj", experts, bias, used=used)

    def _attention(self) -> tuple[int, int, int, float]:
        """Numbers of the matrices and of their biases, bytes of a token kept, and its width."""
        hidden, item = self.hidden, int(_BITS[self.dtype] / 8)
        if self.latent:
            nope, rope, value = self._latent_dims()
            rank = self.size("kv_lora_rank", default=512)
            queries = self.number("q_lora_rank", default=0)
            up = self.heads * (nope + rope)
            asks = queries * (hidden + up + 1) if queries else hidden * up
            keeps = hidden * (rank + rope) + rank * (1 + self.heads * (nope + value))
            size = asks + keeps + self.heads * value * hidden
            biases = (queries + rank + rope + hidden) * self.bias("o")
            return size, biases, item * (rank + rope), self.heads * (rank + rope / 2)
        own, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = (own + 2 * kv) * self.bias("q") + hidden * self.bias("o")
        if self.kind == "gpt_oss":
            biases += self.heads
        return hidden * (2 * own + 2 * kv), biases, 2 * item * kv, float(own)

    def _window(self, i: int) -> int | None:
        """How far back attention of layer ``i`` looks."""
        kinds = self.data.get("layer_types")
        window = self.number(*_WINDOWS, default=8192 if self.kind == "llama4_text" else 0) or None
        if isinstance(kinds, list) and len(kinds) >= self.num_layers:
            local = kinds[i] in ("sliding_attention", "chunked_attention", "local")
            if not local and kinds[i] not in ("full_attention", "attention", "global"):
                raise FormatError(
                    f"{self.path}: layer_types[{i}] = {short(kinds[i])}: only layers of attention "
                    "are known, full or sliding"
                )
            return window if local else None
        if self.kind in _GLOBAL_EVERY:
            step = self.size("sliding_window_pattern", default=_GLOBAL_EVERY[self.kind])
            return window if (i + 1) % step else None
        if self.kind == "gpt_neo":
            return (window or 256) if i % 2 else None
        if self.kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"):
            first = self.number("max_window_layers", default=0)
            return window if self.flag("use_sliding_window", False) and i >= first else None
        return window

    def _is_sparse(self, i: int) -> bool:
        """Whether layer ``i`` has experts."""
        if not self.num_experts:
            return False
        if self.kind == "llama4_text":
            return (i + 1) % self.size("interleave_moe_layer_step", default=1) == 0
        if i < self.number("first_k_dense_replace", "moe_layer_start_index", default=0):
            return False
        only = self.data.get("mlp_only_layers")
        step = self.size("decoder_sparse_step", "moe_layer_interval", default=1)
        return (i + 1) % step == 0 and not (isinstance(only, list) and i in only)

    def _shared_width(self) -> int:
        """Of the feed-forward that every token takes beside its experts."""
        if self.kind == "llama4_text":
            return self.expert_width
        count = self.number("n_shared_experts", "moe_num_shared_experts", default=0)
        return self.number("shared_expert_intermediate_size", default=count * self.expert_width)


# Fields that say whether projections have a bias: of which, and of which types.
_BIASES = (
    ("attention_bias", "qo", (
        "qwen3", "qwen3_moe", "llama", "gemma", "gemma2", "gemma3_text", "granite", "olmo",
        "olmo2", "olmo3", "olmoe", "smollm3", "gpt_neox", "gpt_oss", "cohere", "phimoe", "dots1",
        "nemotron", "apertus", "arcee", "helium", "cohere2", "granitemoe", "hunyuan_v1_dense",
        "deepseek_v2", "deepseek_v3", "internlm3",
    )),
    ("attention_bias", "q", ("seed_oss", "glm", "glm4", "glm4_moe", "glm4v_text", "solar_open")),
    ("attention_out_bias", "o", ("seed_oss",)),
    ("use_qkv_bias", "q", ("stablelm",)),
    ("qkv_bias", "q", ("qwen2_moe",)),
    ("lm_head_bias", "h", ("phimoe",)),
    ("mlp_bias", "m", ("llama", "granite", "arcee", "smollm3", "seed_oss", "helium", "nemotron",
                       "internlm3")),
    ("enable_bias", "qom", ("opt",)),
    ("use_bias", "qom", ("starcoder2", "ernie4_5")),
    ("bias", "qom", ("falcon",)),
)  # fmt: skip
_WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")
# Types of which every so manieth layer looks back without end, the others over a window.
_GLOBAL_EVERY = {"gemma2": 2, "cohere2": 4, "exaone4": 4, "olmo3": 4, "gemma3_text": 6,
                 "gpt_oss": 2, "llama4_text": 4}  # fmt: skip
_SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "gpt_oss", "granitemoe",
           "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe",
           "dots1", "solar_open", "llama4_text")  # fmt: skip
