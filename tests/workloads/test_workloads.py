import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from placement import workloads
from placement.capturing import capture
from placement.program import run_program, split_inputs
from placement.workloads import WorkloadError

HUGGING_FACE = ("bert", "convnext", "gpt2", "resnet", "t5", "vit")
REDUCED = (
    *(f"{name}_tiny" for name in (*HUGGING_FACE, "dlrm", "inception", "lstm")),
    *(f"tiny_{name}" for name in ("branches", "cnn", "mlp", "views")),
)


def load(name, **options):
    if name.startswith(HUGGING_FACE):
        pytest.importorskip("transformers")
    return workloads.load(name, **options)


def flat(value):
    return pytree.tree_flatten(value)[0]


@pytest.mark.parametrize("name", REDUCED)
def test_the_program_gives_what_the_module_gives(name):
    module, inputs = load(name)
    program = capture(module, inputs).program
    args, kwargs = split_inputs(inputs)
    with torch.no_grad():
        expected = module(*args, **kwargs)
    got = program.unflatten_outputs(run_program(program, program.flatten_inputs(args, kwargs)))
    assert type(got) is type(expected)
    for a, b in zip(flat(got), flat(expected), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", REDUCED)
def test_a_workload_is_the_same_twice_and_leaves_the_callers_random_stream(name):
    before = torch.get_rng_state()
    first, inputs = load(name)
    assert torch.equal(torch.get_rng_state(), before)
    again, inputs_again = load(name)
    assert not first.training
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(flat(inputs), flat(inputs_again), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["bert_tiny", "dlrm_tiny", "lstm_tiny", "tiny_views"])
def test_batch_is_an_option(name):
    module, inputs = load(name, batch=3)
    assert capture(module, inputs).fingerprint != capture(*load(name)).fingerprint


# Counts of torch 2.13 with transformers 5: an operator more or less is a change to look at.
@pytest.mark.parametrize(
    ("name", "num_ops", "num_params"),
    [("resnet50", 175, 25_557_032), ("bert_base", 310, 109_482_240)],
)
def test_full_size(name, num_ops, num_params):
    module, inputs = load(name)
    assert sum(p.numel() for p in module.parameters()) == num_params
    graph = capture(module, inputs)
    assert graph.num_ops == num_ops
    used = set(graph.program.param_names)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # Only the counters of batch normalisation take no part in inference.
    assert {n for n in tensors if not n.endswith("num_batches_tracked")} == used
    assert graph.param_bytes.sum() == sum(tensors[n].nbytes for n in used)


def test_gpt2_ties_its_embeddings_and_counts_them_once():
    module, inputs = load("gpt2_tiny")
    assert module.lm_head.weight is module.transformer.wte.weight
    graph = capture(module, inputs)
    tied = [i for i, p in enumerate(graph.program.params) if p is module.lm_head.weight]
    assert len(tied) == 1
    users = graph.param_use_op[graph.param_use == tied[0]]
    assert [graph.op_kind[n] for n in users] == ["aten.embedding.default", "aten.linear.default"]


def test_the_lstm_grid_depends_along_layers_and_time_only():
    graph = capture(*load("lstm", layers=2, steps=3, hidden=4))
    # Cell (l, t) reaches the cells to its right and above, so of 2 x 3 cells the anti-diagonal
    # (0, 1), (1, 0) is independent: neither reaches the other.
    reach = [{n} for n in range(graph.num_ops)]
    for src, dst in graph.edges[::-1]:  # sorted by producer: forward closure needs reverse order
        reach[src] |= reach[dst]
    gates = [n for n, kind in enumerate(graph.op_kind) if kind == "aten.chunk.default"]
    assert [graph.op_module[n] for n in gates] == ["cells.0"] * 3 + ["cells.1"] * 3
    sees = [[j for j in range(6) if gates[j] in reach[gates[i]]] for i in range(6)]
    assert sees == [[0, 1, 2, 3, 4, 5], [1, 2, 4, 5], [2, 5], [3, 4, 5], [4, 5], [5]]


def test_names_are_the_public_functions_of_the_files():
    shipped = workloads.names()
    assert set(REDUCED) < set(shipped)
    full = ("resnet50", "bert_base", "bert_tiny_hidden128", "gpt2", "t5", "vit", "convnext")
    assert {*full, "inception", "lstm", "dlrm"} < set(shipped)
    assert list(shipped) == sorted(shipped)


def test_an_unknown_name_lists_the_known_ones_and_an_unknown_option_what_the_workload_takes():
    with pytest.raises(WorkloadError, match=r"'resnet5'.*bert_base.*resnet50.*package\.module"):
        workloads.load("resnet5")
    with pytest.raises(WorkloadError, match=r"'size'.*batch: .*layers: "):
        workloads.load("lstm", size=3)


def test_missing_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(WorkloadError, match=r"pip install .device-placement-rl\[models\]"):
        workloads.load("bert_tiny")


USERS_OWN = """
import torch
from torch.nn import Linear, functional
def good(width=4): return Linear(width, 2), torch.ones(1, width)
def only_module(): return Linear(4, 2)
def swapped(): return torch.ones(1, 4), Linear(4, 2)
def failing(): raise KeyError("weights")
def ending(): raise SystemExit(0)
def no_pair(): return Linear(4, 2), 4, functional.cross_entropy
not_a_function = 3
a_module = Linear(2, 2)
"""


@pytest.fixture
def users_own(tmp_path, monkeypatch):
    (tmp_path / "users_own.py").write_text(USERS_OWN)
    (tmp_path / "broken.py").write_text("import no_such_package")
    (tmp_path / "a_script.py").write_text("import sys; sys.exit()")
    monkeypatch.syspath_prepend(tmp_path)


def test_the_users_own_function(users_own):
    module, inputs = workloads.load("users_own:good", width=5)
    assert capture(module, inputs, name="mine").name == "mine"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("users_own:absent", "no attribute 'absent'"),
        ("users_own:only_module", r"returned Linear, expected \(module, inputs\)"),
        ("users_own:swapped", r"returned \(Tensor, Linear\), expected"),
        ("users_own:failing", r"the function failed at .*users_own.py:\d+: KeyError: 'weights'"),
        ("users_own:ending", r"the function failed at .*users_own.py:\d+: SystemExit: 0"),
        ("users_own:no_pair", r"returned \(Linear, int, function\), expected"),
        ("users_own:not_a_function", "is of type int, not a function"),
        ("users_own:a_module", "is of type Linear, not a function: name one that returns"),
        ("broken:f", "'broken:f' cannot be imported: .*'no_such_package'$"),
        ("a_script:f", "'a_script:f' cannot be imported: SystemExit.*Keep .* behind: if __name__"),
        ("users_own.py:good", "Name it without .py: users_own:good"),
        ("no_such_file:f", "'no_such_file:f' cannot be imported.*PYTHONPATH"),
    ],
)
def test_a_users_function_that_is_no_workload(users_own, spec, message):
    with pytest.raises(WorkloadError, match=message):
        workloads.load(spec)


@pytest.mark.parametrize(
    ("kind", "config", "shapes"),
    [
        ("GPT2LMHeadModel", {"n_embd": 12, "n_positions": 16}, [(1, 16)]),
        ("ViTModel", dict(hidden_size=12, intermediate_size=8, image_size=32), [(1, 3, 32, 32)]),
        ("WhisperModel", {"d_model": 12, "max_source_positions": 10}, [(1, 80, 20), (1, 16)]),
        ("T5Model", {"d_model": 8, "num_layers": 1}, [(1, 128)] * 2),
        (
            "HubertModel",
            dict(hidden_size=16, conv_dim=(8,) * 7, num_attention_heads=2),
            [(1, 16000)],
        ),
    ],
)
def test_a_folder_of_transformers_is_a_workload(kind, config, shapes, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    factory = getattr(transformers, kind)
    module = factory(factory.config_class(**config))
    module.save_pretrained(tmp_path / "my model")
    monkeypatch.chdir(tmp_path)
    loaded, inputs = workloads.load("my model")
    assert type(loaded) is factory and not loaded.training
    for a, b in zip(loaded.parameters(), module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [tuple(x.shape) for x in inputs.values()] == shapes
    with torch.no_grad():
        assert all(isinstance(x, torch.Tensor) for x in flat(loaded(**inputs)))  # and no cache


def test_a_folder_without_a_model_says_what_is_missing(tmp_path):
    pytest.importorskip("transformers")
    folder = str(tmp_path)
    with pytest.raises(WorkloadError, match=r"holds no model.*config.json"):
        workloads.load(folder)
    config = Path(folder, "config.json")
    config.write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(WorkloadError, match="names no class of transformers: ''"):
        workloads.load(folder)
    config.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2Model"]}))
    with pytest.raises(WorkloadError, match="safetensors"):
        workloads.load(folder)
