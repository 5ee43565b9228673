"""Do pieces compute what the module does? Random cuts, anywhere on two devices, of many models.

    python -m experiments.pieces_equality [MODEL ...] [--draws 3]

For every model and draw: cuts that are best for random costs, so any combination that can be, in
halves, quarters, or a quarter and the rest; every piece on a random one of two devices; results
beside the module's, of the example inputs and of the same in reverse. Models are small ones of
this project and of ``transformers`` (``placement.workloads.zoo``). What is refused is so by an
error, whose text is in the table. Writes ``experiments/results/pieces_equality.md`` and ``.json``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from experiments.runs import two_cores
from experiments.study import Option, Options, Study, run, say
from experiments.tables import Column
from placement.capturing import capture
from placement.executor import Runner
from placement.graph import OpGraph
from placement.pieces import Moves, Pieces, PiecesError, Shares
from placement.pieces.decide import Options as Ways
from placement.pieces.decide import decide, options_of
from placement.pieces.split import cut_graph
from placement.program import CaptureError
from placement.runs.ways import difference
from placement.workloads import load, zoo

OWN = (
    "bert_tiny", "convnext_tiny", "dlrm_tiny", "gpt2_tiny", "inception_tiny", "lstm_tiny",
    "resnet_tiny", "t5_tiny", "vit_tiny",
)  # fmt: skip
FAMILIES = ("Bert", "GPT2", "Llama", "Mixtral", "T5", "ViT", "Bart", "Wav2Vec2")
OTHERS = (
    "ConvNext", "MobileNetV2", "EfficientNet", "Swin", "Segformer", "Deberta", "Falcon", "Gemma2",
    "Qwen3Moe", "Mamba", "Phi3",
)  # fmt: skip
MORE = (
    "ModernBert", "FNet", "Albert", "CLIPText", "Qwen3", "Bloom", "Mpt", "DeepseekV3", "Dinov2",
    "Levit", "MobileViT", "ResNet", "Bit", "FocalNet", "WhisperEncoder",
)  # fmt: skip
SHARES = ((0.5, 0.5), (0.25, 0.75), (0.25,) * 4)


def small(name: str) -> tuple[Any, Any]:
    """A model of this project or of the zoo, and its inputs."""
    of_zoo = next((m for m in zoo.MODELS if m.name == name), None)
    return zoo.small(name, *of_zoo.sizes[0]) if of_zoo else load(name)


def in_random_pieces(graph: OpGraph, found: Sequence[Ways], shares: Shares, seed: int) -> Pieces:
    """Cuts that are best for random costs: any combination that can be."""
    rng = np.random.default_rng(seed)
    options = [Ways(1.0, o.rules, tuple(rng.uniform(0.0, 1.5, len(o.rules)))) for o in found]
    return decide(graph, shares, options, Moves(hop_s=rng.uniform(0.0, 0.5)))


def reverse(x: Tensor) -> Tensor:
    """Other numbers of the same kind, but where something begins."""
    return x.flip(-1) if x.ndim > 1 else x


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """One of each model; one that is finished is not tried again."""
    for name in options.models:
        what = name, options.draws
        yield options.finished.row(dict, what, partial(row, name, options.draws), name=name)


def row(name: str, draws: int) -> dict[str, Any]:
    """What came out of a model."""
    torch.set_num_threads(1)
    module, inputs = small(name)
    facts: dict[str, Any] = {"model": name, "ops": 0, "cuttable": 0, "cut": [], "wrong": ""}
    try:
        graph = capture(module, inputs, name=name)
    except CaptureError as error:
        return facts | {"wrong": f"not captured: {error}"[:200]}
    cluster = two_cores()
    facts["ops"] = graph.num_ops
    for seed in range(draws):
        shares = SHARES[seed % len(SHARES)]
        try:
            found = options_of(graph, shares)
            cut = cut_graph(graph, in_random_pieces(graph, found, shares, seed))
        except PiecesError as error:
            facts["wrong"] = str(error)
            break
        if shares == SHARES[0]:
            facts["cuttable"] = sum(bool(o.rules) for o in found)
        facts["cut"].append(len(cut.program.pieces.rules))
        where = np.random.default_rng(seed).integers(0, 2, cut.num_groups)[cut.group]
        with Runner(cut, cluster, where.astype(np.int32)) as runner:
            given = inputs, pytree.tree_map_only(Tensor, reverse, inputs)
            if wrong := next(filter(None, (difference(runner, module, x) for x in given)), ""):
                facts["wrong"] = f"draw {seed}: {wrong}"
                break
    say(f"{name}: {facts['wrong'] or 'equal'}")
    return facts


STUDY = Study(
    name="pieces_equality",
    rows=rows,
    options={
        "models": Option((*OWN, *FAMILIES, *OTHERS, *MORE), word=True, metavar="MODEL"),
        "draws": Option(3, "of cuts and devices, of each model"),
    },
    columns=(
        Column("model", "model"),
        Column("operators", "ops"),
        Column("that can be halved", "cuttable"),
        Column("cut", lambda r: ", ".join(map(str, r["cut"]))),
        Column("results", lambda r: r["wrong"] or "equal"),
    ),
    facts=lambda options: {"draws": options.draws},
    wrong=lambda rows, options: [r["model"] for r in rows if r["wrong"].startswith("draw")],
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
