"""Small variants of many models, from their configurations: what the data set is made of.

Each is a class of ``transformers`` with random weights, a few layers of a width that fits into a
small machine, and inputs of any size. Nothing is downloaded. ``small`` makes one of them like a
function of ``placement.workloads`` does; its name there is ``placement.workloads.zoo:small``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from placement.workloads import WorkloadError
from placement.workloads.hugging_face import from_config

Kind = Literal["cnn", "vit", "encoder", "decoder", "encoder-decoder", "audio", "moe"]
Size = tuple[int, int]  # batch, and tokens, pixels of a side, or samples of sound

# Names that configurations of one kind have in common; those a class does not know do no harm.
TEXT: dict[str, Any] = {
    "vocab_size": 2000, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1024,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PAIR: dict[str, Any] = {  # encoder and decoder
    "vocab_size": 2000, "d_model": 256, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 1024,
    "decoder_ffn_dim": 1024, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
PATCHES: dict[str, Any] = {
    "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3,
    "intermediate_size": 768,
}  # fmt: skip
STAGES: dict[str, Any] = {"hidden_sizes": [32, 64, 128, 256], "depths": [1, 1, 2, 1]}
LEVELS: dict[str, Any] = {"hidden_sizes": [32, 64, 160, 256], "depths": [1, 1, 1, 1]}
WINDOWS: dict[str, Any] = {"embed_dim": 48, "depths": [1, 1, 2, 1]}
HEADS: dict[str, Any] = {"num_heads": [2, 4, 8, 16]}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "experts_implementation": "batched_mm",
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64, "v_head_dim": 64, "head_dim": 32, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1,
}  # fmt: skip
RELATIVE: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
INNER: dict[str, Any] = {"vocab_size": 2000, "d_model": 256, "n_head": 4, "d_inner": 1024}
TO_TEXT: dict[str, Any] = {"d_kv": 64, "d_ff": 1024, "num_layers": 2, "num_heads": 4}
WHISPER: dict[str, Any] = {
    "d_model": 192, "encoder_layers": 2, "encoder_attention_heads": 3, "num_mel_bins": 80,
    "max_source_positions": 100,
}  # fmt: skip
SOUND: dict[str, Any] = {
    "hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 768, "conv_dim": (64,) * 7, "num_conv_pos_embeddings": 32,
    "num_conv_pos_embedding_groups": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """One configuration.

    Attributes:
        kind: what sort of model it is.
        name: of its class: ``Bert`` for ``BertModel`` and ``BertConfig``.
        config: what differs from the defaults of ``kind``.
        model, settings: names of the two classes where they are others.
        sizes: of the inputs in the data set.
    """

    kind: Kind
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    settings: str = ""
    sizes: tuple[Size, Size] = ((1, 64), (2, 128))


def _kind(kind: Kind, common: dict[str, Any], **usual: Any) -> Callable[..., Model]:
    """How models of a kind are written below: a name, and what differs from the others."""

    def model(name: str, config: dict[str, Any] | None = None, **more: Any) -> Model:
        return Model(kind, name, common | (config or {}), **usual | more)

    return model


_IMAGES: dict[str, Any] = {"sizes": ((1, 96), (2, 160))}
_LARGE = ((1, 224), (2, 224))
_cnn = _kind("cnn", {}, **_IMAGES)
_vit = _kind("vit", PATCHES, **_IMAGES)
_pyramid = _kind("vit", {}, **_IMAGES)  # a vision transformer whose stages differ
_encoder = _kind("encoder", TEXT)
_decoder = _kind("decoder", TEXT)
_both = _kind("encoder-decoder", PAIR)
_audio = _kind("audio", SOUND, sizes=((1, 8000), (2, 16000)))
_moe = _kind("moe", TEXT | EXPERTS)


# Models that differ in nothing but their class.
_VITS = (
    "ViT", "DeiT", "Beit", "Data2VecVision", "ViTMSN", "ViTMAE", "MobileViTV2",
)  # fmt: skip
_ENCODERS = (
    "Bert", "Roberta", "MPNet", "XLMRoberta", "Camembert", "FNet", "Nystromformer", "LayoutLM",
    "Ernie", "MegatronBert", "ModernBert", "NomicBert", "EuroBert", "Yoso", "Canine", "CLIPText",
    "Splinter", "IBert",
)  # fmt: skip
_DECODERS = (
    "GPT2", "GPTNeoX", "GPTBigCode", "Bloom", "Llama", "Mistral", "Ministral", "Qwen2", "Qwen3",
    "Phi", "Phi3", "Gemma", "Gemma2", "Gemma3Text", "Starcoder2", "StableLm", "Cohere", "Cohere2",
    "Olmo", "Olmo2", "Granite", "Persimmon", "BioGpt", "OpenAIGPT", "SmolLM3", "Glm", "Helium",
    "Nemotron", "Arcee", "Apertus", "BitNet", "SeedOss", "ImageGPT",
)  # fmt: skip
_PAIRS = (
    "Bart", "MBart", "PLBart", "Pegasus", "PegasusX", "Marian", "Blenderbot", "BlenderbotSmall",
    "M2M100",
)  # fmt: skip
_SOUNDS = (
    "Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "UniSpeechSat", "Data2VecAudio",
    "Wav2Vec2Conformer",
)  # fmt: skip
_MOES = (
    "Mixtral", "Qwen3Moe", "Olmoe", "Phimoe", "GraniteMoe", "GptOss",
)  # fmt: skip

MODELS: tuple[Model, ...] = (
    _cnn("ResNet", {"embedding_size": 32, **STAGES, "layer_type": "bottleneck"}),
    _cnn("ConvNext", STAGES),
    _cnn("ConvNextV2", STAGES),
    _cnn("DINOv3ConvNext", STAGES),
    _cnn("RegNet", {"embedding_size": 32, **STAGES, "groups_width": 16}),
    _cnn("MobileNetV1", {"depth_multiplier": 0.5}),
    _cnn("MobileNetV2", {"depth_multiplier": 0.5}),
    _cnn("EfficientNet", {"width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640}),
    _cnn("Bit", {"embedding_size": 32, **STAGES, "num_groups": 8}),
    _cnn("PoolFormer", {**STAGES, "num_encoder_blocks": 4}),
    _cnn("TextNet"),
    _cnn("FocalNet", {"embed_dim": 32, "depths": [1, 1, 2, 1], "image_size": 96}),
    _cnn("SwiftFormer", {"depths": [1, 1, 2, 1], "embed_dims": [32, 64, 128, 256]}),
    *map(_vit, _VITS),
    _pyramid("Swin", WINDOWS | HEADS, sizes=_LARGE),
    _pyramid("Swinv2", WINDOWS | HEADS),
    *(_vit(x, {"patch_size": 16}) for x in ("Dinov2", "Dinov2WithRegisters", "DINOv3ViT", "IJepa")),
    *(_pyramid(x, LEVELS) for x in ("Pvt", "PvtV2", "Segformer", "GLPN")),
    _pyramid("Hiera", WINDOWS | {"image_size": [224, 224]}, sizes=_LARGE),
    _pyramid("Levit", {"hidden_sizes": [64, 128, 192], "num_attention_heads": [2, 4, 6]}),
    _vit("MobileViT", {"hidden_sizes": [96, 120, 144]}),
    _vit("Yolos", {"num_detection_tokens": 20, "image_size": [96, 96]}),
    _vit("DPT", {"image_size": 96}),
    *(_vit(x, {"patch_size": 16}) for x in ("SiglipVision", "CLIPVision", "Aimv2Vision")),
    _vit("VitDet", {"image_size": 96}),
    *map(_encoder, _ENCODERS),
    _encoder("DistilBert", {"dim": 256, "hidden_dim": 1024, "n_layers": 3, "n_heads": 4}),
    *(_encoder(x, {"embedding_size": 128}) for x in ("Electra", "Albert")),
    *(_encoder(x, RELATIVE) for x in ("Deberta", "DebertaV2")),
    _encoder("MobileBert", {"embedding_size": 64, "intra_bottleneck_size": 64}),
    *(_encoder(x, {"embedding_size": 256}) for x in ("SqueezeBert", "ConvBert", "RoFormer")),
    _encoder("RemBert", {"input_embedding_size": 128, "output_embedding_size": 128}),
    Model("encoder", "Funnel", INNER | {"block_sizes": [1, 1]}),
    Model("encoder", "XLNet", INNER | {"n_layer": 3}),
    _encoder("BigBird", {"attention_type": "original_full"}),
    _encoder("Esm", {"token_dropout": False, "mask_token_id": 3}),
    *map(_decoder, _DECODERS),
    _decoder("GPTNeo", {"attention_types": [[["global", "local"], 2]], "num_hidden_layers": 4}),
    _decoder("GPTJ", {"rotary_dim": 32}),
    _decoder("OPT", {"ffn_dim": 1024, "word_embed_proj_dim": 256}),
    Model("decoder", "Falcon", {k: v for k, v in TEXT.items() if k != "head_dim"}),
    _decoder("CodeGen", {"rotary_dim": 32}),
    _decoder("Mpt", {"d_model": 256, "n_heads": 4, "n_layers": 3, "max_seq_len": 512}),
    _decoder("XGLM", {"d_model": 256, "ffn_dim": 1024, "attention_heads": 4, "num_layers": 3}),
    _decoder("Mamba", {"state_size": 8}, sizes=((1, 16), (2, 32))),
    *(_both(x, TO_TEXT) for x in ("T5", "MT5", "UMT5")),
    *map(_both, _PAIRS),
    _both("BigBirdPegasus", {"attention_type": "original_full"}),
    *map(_audio, _SOUNDS),
    *(_audio(x, {"squeeze_factor": 2, "conv_dim": (64,) * 13}) for x in ("SEW", "SEWD")),
    _audio(
        "WhisperEncoder", WHISPER, sizes=((1, 200), (2, 200)), settings="WhisperConfig",
        model="models.whisper.modeling_whisper.WhisperEncoder",
    ),
    _audio("AST", {"num_mel_bins": 64, "max_length": 128}, sizes=((1, 128), (2, 128))),
    *map(_moe, _MOES),
    _moe("Qwen2Moe", {"shared_expert_intermediate_size": 512}),
    *(_moe(x, LATENT) for x in ("DeepseekV2", "DeepseekV3")),
    _moe("Dots1", {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    _moe("Glm4Moe", {"n_group": 1, "topk_group": 1}),
    _moe("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2}),
    _moe("Jamba", {"use_mamba_kernels": False}, sizes=((1, 16), (2, 32))),
    Model("moe", "NllbMoe", PAIR | {"num_experts": 4}),
)  # fmt: skip


def small(model: str, batch: int = 1, size: int = 64) -> tuple[Any, Any]:
    """The small variant of ``model`` (a name in ``MODELS``), and example inputs.

    Args:
        size: tokens, pixels of a side, samples of sound, or frames of a spectrogram.

    Raises:
        WorkloadError: no such model, or transformers is missing or of another version.
    """
    kind = {m.name: m for m in MODELS}.get(model)
    if kind is None:
        raise WorkloadError(
            f"model {model!r} is unknown; there are {', '.join(m.name for m in MODELS)}"
        )
    names = kind.model or f"{kind.name}Model", kind.settings or f"{kind.name}Config"
    options = {"image_size": size} if kind.kind in ("cnn", "vit") else {}
    fixed = {"use_cache": False, "return_dict": True}
    return from_config(*names, batch, size, options | kind.config | fixed)
