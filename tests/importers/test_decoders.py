"""Language models without weights: configs against the models themselves, headers of GGUF files."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from placement.importers import FormatError, is_decoder, load, load_decoder
from placement.importers.decoder import Decoder
from placement.importers.hf_config import read
from tests.problems import written
from tests.served import LLAMA, MIXTRAL, gguf, gguf_llama
from tests.served import decoder as decoder_of

# Of each kind of architecture one; small, with numbers that tell the fields apart.
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SMALL = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "phi": {},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "olmo2": {},
    "cohere": {"use_qk_norm": True},
    "glm4": {"head_dim": 8, "pad_token_id": 0},
    "starcoder2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
    | {"shared_expert_intermediate_size": 40},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "deepseek_v2": ROUTED
    | {"q_lora_rank": None, "kv_lora_rank": 24, "first_k_dense_replace": 1}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 50},
    "gpt_neox": {"attention_bias": False},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "lm_head_bias": True}
    | {"attention_bias": True},
    "llama4_text": {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 80},
    "opt": {"ffn_dim": 96, "max_position_embeddings": 50, "word_embed_proj_dim": 24}
    | {"do_layer_norm_before": False},
    "bloom": {"n_layer": 3, "n_head": 4},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4},
    "cohere2": {"attention_bias": True, "head_dim": 16},
    "helium": {"head_dim": 16, "mlp_bias": True},
    "hunyuan_v1_dense": {"attention_bias": True, "head_dim": 16},
    "apertus": {},
    "internlm3": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "granitemoe": {"attention_bias": True, "num_local_experts": 4},
    "nemotron": {"mlp_bias": True, "head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48},
    "glm4_moe": ROUTED | {"head_dim": 16, "use_qk_norm": True},
    "mamba": {"num_hidden_layers": 3, "state_size": 8},
    "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2, "full_attention_interval": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4}
    | {"mamba_n_heads": 8, "mamba_d_head": 16},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "n_mamba_heads": 8}
    | {"hybrid_layer_ids": [1, 2], "mamba_ngroups": 1, "num_mem_blocks": 1},
    "deepseek_v3": ROUTED
    | {"n_routed_experts": 8, "attention_bias": True, "q_lora_rank": 20}
    | {"n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
}
FALCON_H1 = {"model_type": "falcon_h1", "hidden_size": 64, "num_hidden_layers": 3,
             "vocab_size": 130, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 96, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4,
             "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}  # fmt: skip
# What else models of a type may have.
MORE = {
    "phi": {"qk_layernorm": True},
    "qwen2_moe": {"qkv_bias": False},
    "opt": {"enable_bias": False, "_remove_final_layer_norm": True},
}


@pytest.mark.parametrize("kind", SMALL)
def test_bytes_are_those_of_the_model(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    common = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
              "intermediate_size": 96, "vocab_size": 130}  # fmt: skip
    if kind not in ("opt", "bloom", "mpt", "gpt2", "gpt_neox", "phi", "falcon", "deepseek_v2"):
        common["num_key_value_heads"] = 2
    if kind in ("gpt2", "mpt"):
        common = {"vocab_size": 130}
    if kind in ("opt", "bloom", "falcon"):
        del common["intermediate_size"]
    for tied, more in ((False, {}), (True, MORE.get(kind, {}))):
        given = {**common, **SMALL[kind], **more, "tie_word_embeddings": tied}
        config = transformers.AutoConfig.for_model(kind, **given, torch_dtype="float32")
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        decoder = read(json.loads(config.to_json_string(use_diff=False)), "c.json", "c")
        own = {name: size for part in decoder.parts for name, size in part.weights.items()}
        assert sum(own.values()) == sum(p.numel() * 4 for p in model.parameters())
        assert decoder.num_layers == 3
        # Modules are the model's own, every parameter in one of them.
        modules = {part.module for part in decoder.parts}
        for name, _ in model.named_parameters():
            above = {name.rsplit(".", k)[0] for k in range(name.count(".") + 1)}
            assert len(above & modules) == 1, name


def test_numbers_of_a_layer() -> None:
    attention, feed = decoder_of(LLAMA).parts[1:3]
    assert attention.name == "model.layers.0.attention" and attention.module == "model.layers.0"
    assert attention.kv_bytes == 2 * 2 * 8 * 128 and attention.window is None
    assert attention.numel == 4096 * (4096 + 2 * 1024 + 4096) and attention.width == 4096
    assert feed.numel == 3 * 4096 * 14336 and feed.used == 1.0
    _, router, experts = decoder_of(MIXTRAL).parts[1:4]
    assert experts.kind == "experts" and experts.used == 0.25
    assert experts.numel == 8 * 3 * 4096 * 14336 and router.numel == 8 * 4096


def test_windows() -> None:
    def windows(**config: Any) -> list[int | None]:
        parts = decoder_of(LLAMA, num_hidden_layers=6, **config).parts
        return [part.window for part in parts if part.kind == "attention"]

    assert windows(model_type="mistral", sliding_window=9) == [9] * 6
    assert windows(model_type="qwen2", sliding_window=9, use_sliding_window=False) == [None] * 6
    assert windows(model_type="gemma2", sliding_window=9) == [9, None] * 3
    assert windows(model_type="gemma3_text", sliding_window=9) == [9] * 5 + [None]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1}
    assert windows(model_type="llama4_text", **experts) == [8192] * 3 + [None] + [8192] * 2
    assert windows(model_type="mistral") == [4096] * 6
    kinds = ["sliding_attention", "full_attention", "full_attention"] * 2
    assert windows(sliding_window=9, layer_types=kinds) == [9, None, None] * 2
    with pytest.raises(FormatError, match="LinearAttention"):  # which a Llama has none of
        windows(layer_types=["linear_attention"] * 6)


def test_quantised_matrices_have_their_bits() -> None:
    plain = decoder_of(LLAMA).class_bytes()
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    quarter = decoder_of(LLAMA, quantization_config=awq).class_bytes()
    assert quarter["feed_forward"] / plain["feed_forward"] == pytest.approx((4 + 20 / 128) / 16)
    assert quarter["embedding"] == plain["embedding"]
    group = {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}
    half = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    decoder = decoder_of(LLAMA, quantization_config=half | {"ignore": ["re:.*self_attn"]})
    assert decoder.class_bytes()["feed_forward"] / plain["feed_forward"] == 0.5
    assert decoder.class_bytes()["attention"] == plain["attention"]
    one = awq | {"modules_to_not_convert": ["model.layers.3.mlp", "lm_head"]}
    sizes = [p.weight_bytes for p in decoder_of(LLAMA, quantization_config=one).parts]
    assert sizes[8] == 2 * 3 * 4096 * 14336 > sizes[6] == sizes[10]
    skips = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    skips["llm_int8_skip_modules"] = ["lm_head", "model.layers.3.mlp"]
    sizes = [p.weight_bytes for p in decoder_of(LLAMA, quantization_config=skips).parts]
    assert sizes[8] == 2 * 3 * 4096 * 14336 > sizes[6] == sizes[10]
    group["weights"] |= {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    nvfp4 = decoder_of(LLAMA, quantization_config=half).class_bytes()
    assert nvfp4["feed_forward"] / plain["feed_forward"] == 4.5 / 16
    with pytest.raises(FormatError, match="quantization_config"):
        decoder_of(LLAMA, quantization_config={"quant_method": "new"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "the architecture 'lama' is not known; did you mean llama"),
        ({"model_type": "minicpm"}, "'minicpm' is not known.* code that comes with a model is not"),
        ({"model_type": "t5"}, "no t5 can be run"),
        ({"model_type": "bert"}, "what its layers keep of a token is not known"),
        ({"hidden_size": None}, "'hidden_size' expected int"),
        ({"hidden_size": 2**40}, "overflow"),
        ({"vocab_size": 2**48}, "larger than any memory"),
        ({"hidden_size": "4096"}, "'hidden_size' expected int, got str"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "in range"),
        ({"hidden_act": "none"}, "no llama can be run with these numbers: 'none'"),
        ({"num_hidden_layers": 1025}, "too large: at most 1024"),
        ({"num_hidden_layers": 0}, "no list of its layers"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' expected bool"),
        ({"torch_dtype": "int3"}, "dtype = 'int3' is none of"),
        ({"num_key_value_heads": -1}, "negative dimension"),
    ],
)
def test_configs_that_are_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        decoder_of(LLAMA, **change)


def test_the_text_model_of_a_larger_one() -> None:
    """Files leave out what is the default of the inner type: Gemma 3 4B has 3.88 B weights."""
    inner = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
             "num_hidden_layers": 34, "sliding_window": 1024}  # fmt: skip
    outer = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": inner}
    decoder = read(outer, "c.json", "c")
    assert sum(decoder.class_bytes().values()) == 2 * 3_880_263_168
    assert decoder.format == "text_config"
    llava = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    assert sum(read(llava, "c.json", "c").class_bytes().values()) == 2 * 6_738_939_904


@pytest.mark.parametrize(
    ("kind", "hidden", "inner", "layers", "heads", "kv_heads", "vocabulary", "published"),
    [
        ("qwen2_5_vl", 3584, 18944, 28, 28, 4, 152064, 7_615_616_512),
        ("qwen3_vl_text", 4096, 12288, 36, 32, 8, 151936, 8_190_735_360),
    ],
)
def test_weights_as_published(kind, hidden, inner, layers, heads, kv_heads, vocabulary, published):
    config = {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocabulary,
        "num_key_value_heads": kv_heads,
    }  # fmt: skip
    assert sum(read(config, "c.json", "c").class_bytes().values()) == 2 * published
    outer = {"model_type": "new", "llm_config": config, "vision_config": {}}
    assert read(outer, "c.json", "c").format == "text_config"


def test_what_is_left_out_is_what_transformers_takes() -> None:
    no_kv = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert read(no_kv, "c.json", "c").parts[1].kv_bytes == 2 * 2 * 4096
    assert read(no_kv | {"model_type": "mistral"}, "c.json", "c").parts[1].kv_bytes == 2 * 2 * 1024
    no_inner = {k: v for k, v in LLAMA.items() if k != "intermediate_size"}
    assert read(no_inner, "c.json", "c").parts[2].numel == 3 * 4096 * 11008


def test_recurrent_layers_keep_a_state_once() -> None:
    """Qwen3-Next: every fourth layer keeps keys, the others 3 numbers and a matrix a head.

    2 x 16 heads of keys and 32 of values, 128 wide, in fp16 over a convolution of 4; and for each
    of 32 heads 128 x 128 numbers in fp32.
    """
    config = {"model_type": "qwen3_next", "num_hidden_layers": 4, "hidden_size": 64,
              "vocab_size": 1000, "num_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
    parts = [p for p in read(config, "c.json", "c").parts if p.kind == "attention"]
    state = 2 * (2 * 16 + 32) * 128 * 4 + 4 * 32 * 128 * 128
    assert [p.kv_bytes for p in parts] == [state] * 3 + [2 * 2 * 2 * 256]
    assert [p.window for p in parts] == [1, 1, 1, None]


def test_a_layer_with_keys_and_a_state_is_two_parts() -> None:
    """Falcon-H1 adds attention and Mamba; Zamba2 has one block of attention in several layers."""
    h1 = read(FALCON_H1 | {"torch_dtype": "float32"}, "c.json", "c").parts[1:4]
    assert [p.name.rpartition(".")[2] for p in h1] == ["attention", "recurrent", "feed_forward"]
    # 2 heads of 16 of keys and values; of 4 heads of 16 a matrix of 8 beside each number.
    assert h1[0].kv_bytes == 4 * 2 * 2 * 16 and h1[0].window is None
    assert h1[1].kv_bytes == 4 * ((64 + 2 * 8) * 4 + 64 * 8) and h1[1].window == 1


def test_sizes_as_published() -> None:
    """gpt-oss-20b's files have 13,761,264,768 bytes; DeepSeek-V3 keeps 70,272 of a token."""
    oss = {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
           "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 24,
           "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088,
           "attention_bias": True, "tie_word_embeddings": False, "sliding_window": 128,
           "quantization_config": {"quant_method": "mxfp4"}}  # fmt: skip
    assert sum(read(oss, "c.json", "c").class_bytes().values()) == 13_761_264_768
    v3 = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
          "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
          "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_attention_heads": 128,
          "first_k_dense_replace": 3, "q_lora_rank": 1536, "vocab_size": 129280,
          "tie_word_embeddings": False}  # fmt: skip
    deepseek = read(v3, "c.json", "c")
    assert sum(part.kv_bytes for part in deepseek.parts) == 70_272
    assert sum(deepseek.class_bytes().values()) == 2 * 671_026_404_352


def test_files_are_told_apart(tmp_path: Path) -> None:
    path = written(tmp_path / "llama-8b" / "config.json", LLAMA)
    assert is_decoder(path) and load_decoder(path).name == "llama-8b"
    packed = written(path.with_name("config.json.gz"), gzip.compress(path.read_bytes()))
    assert is_decoder(packed) and load_decoder(packed) == load_decoder(path)
    with pytest.raises(FormatError, match="--objective prefill, decode or serve"):
        load(path)
    assert is_decoder(written(tmp_path / "m.gguf", gguf_llama()))
    with pytest.raises(FormatError, match="a language model without weights"):
        load(tmp_path / "m.gguf")
    assert not is_decoder(tmp_path / "no such file")


# GGUF


ONE_LAYER: dict[str, Any] = {
    "general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
}  # fmt: skip
ITS_TENSORS = [("token_embd.weight", (64, 10), 1), ("blk.0.attn_k.weight", (64, 64), 1)]


def header(path: Path, data: bytes) -> Decoder:
    return load_decoder(written(path, data))


def test_a_gguf_header(tmp_path: Path) -> None:
    decoder = header(tmp_path / "small.gguf", gguf_llama())
    # Q4_K: 144 bytes of 256 elements, Q6_K: 210, F32: 4 each.
    attention = (256 * 256 * 2 + 256 * 64) * 144 // 256 + 256 * 64 * 210 // 256 + 4 * 256
    assert decoder.class_bytes() == {
        "embedding": 1024 * 144,
        "attention": 4 * attention,
        "feed_forward": 4 * (3 * 512 * 144 + 4 * 256),
        "head": 1024 * 210 + 4 * 256,
    }
    assert decoder.parts[1].kv_bytes == 2 * 2 * 2 * 32 and decoder.parts[1].module == "blk.0"
    routed = header(tmp_path / "moe.gguf", gguf_llama(experts=8))
    names = [f"blk.0.{x}" for x in ("attention", "router", "experts")]
    assert [p.name for p in routed.parts[1:4]] == names
    assert routed.parts[3].used == 0.25
    tied = header(tmp_path / "tied.gguf", gguf_llama(tied=True))
    assert tied.parts[-1].weights == {"token_embd.weight": 1024 * 144}
    assert tied.class_bytes()["head"] == 4 * 256


@pytest.mark.parametrize(
    ("name", "more", "windows"),
    [
        ("gemma2", {}, [9, None] * 3),
        ("gemma3n", {}, [9, 9, 9, 9, None, 9]),
        ("exaone4", {}, [9, 9, 9, None, 9, 9]),
        ("llama4", {}, [8192, 8192, 8192, None, 8192, 8192]),
        ("llama4", {"attention.sliding_window": 0}, [None] * 6),
        ("gemma3", {"attention.sliding_window_pattern": 3}, [9, 9, None] * 2),
        ("phi3", {}, [None] * 6),
        ("llama", {}, [None] * 6),
    ],
)
def test_windows_are_those_of_llama_cpp(name, more, windows, tmp_path):
    numbers = {"block_count": 6, "embedding_length": 64, "attention.head_count": 4}
    numbers |= {"attention.sliding_window": 9} | more
    values = {"general.architecture": name} | {f"{name}.{k}": v for k, v in numbers.items()}
    layers = [(f"blk.{i}.attn_k.weight", (64, 64), 1) for i in range(6)]
    decoder = header(tmp_path / "w.gguf", gguf(values, [ITS_TENSORS[0], *layers]))
    assert [part.window for part in decoder.parts if part.kind == "attention"] == windows


def test_layers_that_are_recurrent_keep_one_state(tmp_path: Path) -> None:
    """``llama_hparams::n_embd_r`` and ``n_embd_s`` of llama.cpp, as for Qwen3-Next 80B-A3B."""
    values = {
        "general.architecture": "qwen3next", "qwen3next.block_count": 2,
        "qwen3next.embedding_length": 64, "qwen3next.attention.head_count": 4,
        "qwen3next.ssm.inner_size": 4096, "qwen3next.ssm.state_size": 128,
        "qwen3next.ssm.group_count": 16, "qwen3next.ssm.conv_kernel": 4,
    }  # fmt: skip
    tensors = [("token_embd.weight", (64, 10), 1), ("blk.0.ssm_out.weight", (64, 64), 1),
               ("blk.1.attn_k.weight", (64, 64), 1)]  # fmt: skip
    linear, full = header(tmp_path / "h.gguf", gguf(values, tensors)).parts[1:3]
    assert linear.kv_bytes == 4 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096) and linear.window == 1
    own = [
        *tensors,
        ("blk.0.attn_qkv.weight", (64, 64), 1),
        ("blk.0.attn_gate.weight", (64, 64), 1),
    ]
    assert header(tmp_path / "h.gguf", gguf(values, own)).parts[1].kv_bytes == linear.kv_bytes
    assert full.kv_bytes == 2 * 2 * 64 and full.window is None
    both = [*tensors, ("blk.0.attn_k.weight", (64, 64), 1)]
    with pytest.raises(FormatError, match=r"blk\.0 has both attention and a recurrent state"):
        header(tmp_path / "h.gguf", gguf(values, both))
    wrong = {k.replace("qwen3next", "rwkv7"): v for k, v in values.items()}
    with pytest.raises(FormatError, match="not a decoder's: no tokens, or no cache"):
        header(tmp_path / "r.gguf", gguf(wrong | {"general.architecture": "rwkv7"}, tensors))


def test_what_layers_keep_where_windows_have_smaller_heads_and_the_last_have_none(tmp_path):
    """``key_length_swa`` and ``shared_kv_layers``, as for Gemma 4; a block that guesses ahead."""
    numbers = {
        "block_count": 5, "nextn_predict_layers": 1, "embedding_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
        "attention.key_length_swa": 16, "attention.value_length_swa": 16,
        "attention.sliding_window": 9, "attention.sliding_window_pattern": [1, 0, 1, 0, 0],
        "attention.shared_kv_layers": 1,
    }  # fmt: skip
    values = {"general.architecture": "new"} | {f"new.{k}": v for k, v in numbers.items()}
    layers = [(f"blk.{i}.attn_k.weight", (64, 64), 1) for i in range(5)]
    parts = header(tmp_path / "g.gguf", gguf(values, [ITS_TENSORS[0], *layers])).parts
    kept = [(part.kv_bytes, part.window) for part in parts if part.kind == "attention"]
    small, full = 2 * 2 * (16 + 16), 2 * 2 * (32 + 32)
    assert kept == [(small, 9), (full, None), (small, 9), (0, None)]
    assert not any("blk.4" in name for part in parts for name in part.weights)
    with pytest.raises(FormatError, match="layer 0 has no tensors"):
        few = values | {"new.nextn_predict_layers": 5}
        header(tmp_path / "g.gguf", gguf(few, [ITS_TENSORS[0], *layers]))


def test_a_gguf_header_is_read_as_by_its_own_package(tmp_path: Path) -> None:
    package = pytest.importorskip("gguf")
    path = tmp_path / "small.gguf"
    header(path, gguf_llama(experts=4))
    path.write_bytes(path.read_bytes() + bytes(2**22))  # its reader wants the tensors too
    sizes = {t.name: int(t.n_bytes) for t in package.GGUFReader(path).tensors}
    own = {name: size for part in load_decoder(path).parts for name, size in part.weights.items()}
    assert own == sizes


def test_a_header_that_is_cut_off_anywhere(tmp_path: Path) -> None:
    whole, path = gguf_llama(layers=1), tmp_path / "cut.gguf"
    for size in [*range(4, 80), *range(80, len(whole), 37), len(whole) - 1]:
        with pytest.raises(FormatError, match=r"cut\.gguf: the GGUF file is cut off"):
            header(path, whole[:size])


def test_a_model_in_several_files(tmp_path: Path) -> None:
    values, first = ONE_LAYER | {"split.count": 2}, ITS_TENSORS
    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    with pytest.raises(FormatError, match=r"is part 1 of 2; m-00002-of-00002\.gguf is not there"):
        header(paths[0], gguf(values, first))
    paths[1].write_bytes(gguf({"split.count": 2}, [("blk.0.ffn_up.weight", (64, 32), 1)]))
    sizes = {"embedding": 1280, "attention": 8192, "feed_forward": 4096}
    assert load_decoder(paths[0]).class_bytes() == sizes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"general.architecture": "mystery"}, r"mystery\.block_count = None"),
        ({"llama.block_count": 2**31}, "must be a whole number from 1 to"),
        ({"llama.attention.head_count": 0}, "head_count = 0"),
        ({"llama.attention.causal": False}, "is not a decoder's"),
        ({"llama.block_count": 2}, "layer 1 has no tensors"),
    ],
)
def test_headers_that_are_wrong(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        header(tmp_path / "wrong.gguf", gguf(ONE_LAYER | values, ITS_TENSORS))
