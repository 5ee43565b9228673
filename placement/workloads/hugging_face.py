"""Models of ``transformers``: those in a folder of ``save_pretrained``, and inputs of any model.

Nothing is downloaded, and no code from a folder runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from placement.workloads import WorkloadError, import_transformers, seeded


def pretrained(folder: str, batch: int = 1, size: int | None = None) -> tuple[Any, Any]:
    """The model of ``config.json`` with the weights of its safetensors, and random inputs.

    Args:
        size: tokens, pixels of a side, samples of sound, or frames of a spectrogram; None: what
            the configuration says, or else 128 tokens, 224 pixels or 16,000 samples.

    Raises:
        WorkloadError: transformers cannot load it, or its inputs are of another sort.
    """
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()  # there is ours
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **here)
        config.get_text_config().use_cache = False  # a cache is no tensor
        (name, *_) = config.architectures or [""]
        if not hasattr(transformers, name):
            raise WorkloadError(f"its 'architectures' names no class of transformers: {name!r}")
        kind = getattr(transformers, name)
        module = kind.from_pretrained(folder, config=config, use_safetensors=True, **here)
    except Exception as error:  # of any of its packages
        raise WorkloadError(
            f"{folder} holds no model that transformers can load ({type(error).__name__}: {error});"
            " there must be config.json with 'architectures', and weights as safetensors, as "
            "model.save_pretrained(folder) writes them"
        ) from error
    with seeded():
        return module.eval(), example_inputs(module, batch, size or _usual(module))


def from_config(
    model: str, settings: str, batch: int, size: int, config: Mapping[str, Any]
) -> tuple[Any, Any]:
    """A class of transformers with random weights of a fixed seed, and random inputs of ``size``.

    ``model`` and ``settings`` are names in transformers, of the class and of its configuration's.

    Raises:
        WorkloadError: transformers is missing, or has no such class.
    """
    transformers = import_transformers()
    try:
        kind, configure = (attrgetter(name)(transformers) for name in (model, settings))
    except AttributeError as error:
        raise WorkloadError(f"transformers {transformers.__version__}: {error}") from None
    with seeded():
        module = kind(configure(**config)).eval()
        return module, example_inputs(module, batch, size)


def _usual(module: Any) -> int:
    """The size of inputs that a model is made for."""
    config, name = module.config, module.main_input_name
    if name == "pixel_values":
        side = getattr(config, "image_size", None) or 224
        return side if isinstance(side, int) else side[0]
    if hasattr(config, "num_mel_bins"):
        return int(getattr(config, "max_length", None) or 2 * config.max_source_positions)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or 128
    return min(128, longest) if name == "input_ids" else 16_000


def example_inputs(module: Any, batch: int, size: int) -> dict[str, Any]:
    """Random keyword arguments for a model of ``transformers``; ``size`` as for ``pretrained``.

    Raises:
        WorkloadError: its main input is of another sort.
    """
    import torch

    config, name = module.config, module.main_input_name
    bins = getattr(config, "num_mel_bins", None)
    shapes: dict[str, tuple[Any, ...]] = {
        "pixel_values": (batch, getattr(config, "num_channels", None) or 3, size, size),
        "input_values": (batch, size, bins) if bins else (batch, size),
        "input_features": (batch, bins, size),
    }

    def tokens(length: int) -> Any:
        known = config.get_text_config().vocab_size
        return torch.randint(3, min(1000, known), (batch, length))

    if name == "input_ids":
        inputs = {name: tokens(size)}
    elif name in shapes and None not in shapes[name]:
        inputs = {name: torch.randn(shapes[name])}
    else:
        raise WorkloadError(
            f"the example inputs of a {type(module).__name__} are not known: give a function that "
            "returns (module, inputs), as package.module:function"
        )
    if "decoder_input_ids" in inspect.signature(module.forward).parameters:
        inputs["decoder_input_ids"] = inputs[name].clone() if name == "input_ids" else tokens(16)
    return inputs
