"""Files that somebody made up: one clear line, at once, whatever is in them."""

from __future__ import annotations

import gzip
import json
import re
import struct
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cli.audit import last_load
from placement.cluster import Cluster, _matching
from placement.importers import FormatError, load
from placement.problem import ProblemError
from placement.runs.trials import TrialError, Trials, fingerprint
from placement.simulator import simulate
from placement.timeline import Timeline, TimelineError, steady_period
from placement.tools.files import parse_json, parse_yaml, short
from tests import fuzz
from tests.problems import random_problem, written
from tests.runtimes import Biased, layered

NINE = [(b, ", ".join([f"*{a}"] * 9)) for a, b in pairwise("abcdefghi")]
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(f"{b}: &{b} [{n}]\n" for b, n in NINE)
MERGED = "a: &a {x: 1, y: 2}\n" + "".join(f"{b}: &{b} {{<<: [{n}]}}\n" for b, n in NINE)
NODE = {"id": 0, "supportedOnFpga": 1, "fpgaLatency": 1, "cpuLatency": 1, "isBackwardNode": 0}
DNN = {"maxFPGAs": 1, "maxCPUs": 1, "maxSizePerFPGA": 9, "nodes": [NODE], "edges": []}
BLOCK = {"id": 0, "name": "f", "devices": [0], "time": 1, "memory": 0, "deps": []}


@pytest.mark.parametrize(
    "text",
    [
        BOMB + "devices: *i",
        BOMB + "devices: [{name: *i}]",
        BOMB + "devices: [{name: a, memory_bytes: *i}]",
        BOMB + "devices: [{name: a}]\nlinks: {x: *i}",
        MERGED + "devices: [*i]",
        "devices: &a [*a]",
    ],
    ids=["list", "name", "number", "links", "merged", "itself"],
)
def test_aliases_of_aliases_are_refused_at_once(text: str, tmp_path: Path, says: Any) -> None:
    path = written(tmp_path / "bomb.yaml", text)
    argv = ["plan", "tiny_mlp", "--planner", "heft", "--cluster", str(path)]
    assert re.search("repeat each other|nested deeper", says.refused(argv))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "tensors, at most"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "bytes of a text, at most"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), "items of 'k'"),
        (b"GGUF" + struct.pack("<IQQQ1sII", 3, 0, 1, 1, b"k", 9, 9), "cut off"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648"),
        (b'{"model_type": "llama", "num_hidden_layers": 1000000000}', "at most 1024"),
        (b'{"model_type": "mixtral", "hidden_size": 8, "num_hidden_layers": 5000}', "at most 1024"),
        (b'{"model_type": "a\\u202eb\\n"}', "is not known"),
        (b'{"model_type": "llama", "hidden_size": 1e999}', "hidden_size|JSON"),
    ],
)
def test_models_without_weights_that_are_none(data, message, tmp_path, says):
    path = written(tmp_path / "model.json", data)
    argv = ["plan", str(path), "--planner", "heft", "--objective", "decode", "--context", "9"]
    assert re.search(message, says.refused(argv))


def test_aliases_that_help_are_taken(tmp_path: Path) -> None:
    text = "devices:\n- &x {name: a, like: cpu:0, speed: 2}\n- {<<: *x, name: b}\n"
    cluster = Cluster.from_yaml(written(tmp_path / "two.yaml", text))
    assert [(d.name, d.speed) for d in cluster.devices] == [("a", 2.0), ("b", 2.0)]


@settings(max_examples=60)
@given(st.text("ab*", max_size=8), st.lists(st.text("ab", max_size=6), max_size=5))
def test_patterns_match_what_their_star_stands_for(pattern: str, names: list[str]) -> None:
    exactly = re.compile(".*".join(map(re.escape, pattern.split("*")))).fullmatch
    assert _matching(pattern, names) == [d for d, name in enumerate(names) if exactly(name)]


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 500_000 + "x",  # whose blank lines were looked at again from each of them
        "op,Name,_input_nodes,fw_latency,bw_latency,acc_latency,output_shape,dtype\n"
        f"c,n,{{}},1,0,,,torch.float{'1' * 130_000}x",
        gzip.compress(b"") * 100_000,
    ],
    ids=["lines", "digits", "parts"],
)
def test_long_files_take_as_long_as_they_are(text: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        load(written(tmp_path / "f.txt", text))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 3), max_size=12))
def test_the_last_load_of_a_log_is_that_of_all_layers(layers: list[int]) -> None:
    lines = [f"load_tensors: layer {i} assigned to device {k}, \n" for k, i in enumerate(layers)]
    starts = [k for k, i in enumerate(layers) if i == 0]
    whole = [lines[a:b] for a, b in pairwise([*starts, len(lines)]) if max(layers) in layers[a:b]]
    if whole:
        assert last_load("".join(lines)) == "".join(whole[-1])


def test_a_pattern_of_many_stars_is_quick() -> None:
    assert _matching("*a" * 5000 + "c", ["a" * 6000] * 5) == []


@pytest.mark.parametrize("text", ["[" * 500 + "]" * 500, '{"a":' * 150 + "1" + "}" * 150])
def test_nesting_is_limited(text: str) -> None:
    for parse in (parse_json, parse_yaml):
        with pytest.raises(ValueError, match="nested deeper than 100 levels"):
            parse(text)
    assert parse_json("[" * 100 + "]" * 100)


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(width=32) | st.text(),
        lambda part: st.lists(part) | st.dictionaries(st.text(), part),
        max_leaves=9,
    )
)
def test_json_that_python_writes_is_read_as_it_was(value: Any) -> None:
    assert repr(parse_json(json.dumps(value), infinite=True)) == repr(value)


def test_anything_is_shown_short() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    for value in (deep, "x" * 10**6, 10**4000, {"k" * 999: [1] * 10**6}, np.zeros(10**6)):
        assert len(short(value)) <= 60


def case(ndevs: Any = 1, mode: Any = "train", **block: Any) -> dict[str, Any]:
    return {"cases": {"a": {"ndevs": ndevs, "mode": mode, "blocks": [BLOCK | block]}}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DNN | {"maxFPGAs": 2 * 10**18}, "2000000000000000001 devices"),
        (DNN | {"maxFPGAs": 2 * 10**9}, "2000000001 devices"),
        (DNN | {"maxCPUs": 4096}, "4097 devices"),
        (DNN | {"nodes": [NODE | {"id": i} for i in range(99)], "maxCPUs": 999}, "1000 devices"),
        (DNN | {"maxFPGAs": 10**5000}, "5001 characters) is too large"),
        (DNN | {"nodes": [NODE | {"size": 10**300}]}, "size"),
        ({"num_devices": 10**9, "nodes": [{"id": 0, "time": []}], "edges": []}, "1000000000"),
        (case(10**9), "ndevs = 1000000000"),
        (case(True), "ndevs = True: input should be a valid integer"),
        (case(mode=-1), "mode = -1: input should be"),
        (case(time=10**18), "1000000000000000000"),
        (case(memory=1e308), "memory = 1000000000000000"),
    ],
)
def test_counts_of_a_file_are_not_believed(content, message, tmp_path, says):
    sys.set_int_max_str_digits(0)  # to write them
    path = written(tmp_path / "f.json", content)
    sys.set_int_max_str_digits(4300)
    more = SCHEDULED if "cases" in content else ["--out", str(tmp_path / "o.json")]
    verb = "schedule" if "cases" in content else "import"
    assert message in says.refused([verb, str(path), *more])


SCHEDULED = ["--case", "a", "--micro-batches", "2"]


@pytest.mark.parametrize("kind", ["pipedream", "doppler", "stg", "neusight"])
def test_counts_of_an_option_are_not_believed(kind: str, tmp_path: Path, says: Any) -> None:
    ((name, data),) = fuzz.made_targets([kind])[kind].files.items()
    path = written(tmp_path / name, data)
    argv = ["import", str(path), "--out", str(tmp_path / "o.json"), "--devices"]
    for count in ("2000000000", "0", "-1"):
        assert f"devices = {count} must be from 1 to " in says.refused([*argv, count])


def test_micro_batches_of_a_file_are_not_believed() -> None:
    problem = random_problem(1, num_ops=6)
    for many in ({"num_microbatches": 10**9}, {"num_microbatches": 10**6, "max_in_flight": 10**6}):
        with pytest.raises(ProblemError, match=r"num_microbatches = 10+ of 6 operators"):
            replace(problem, **many)


def test_a_period_of_many_micro_batches_does_not_take_their_square() -> None:
    done = np.cumsum(np.tile([1.0, 2.0, 3.0], 100_000)) + 0.0
    done[-1] += 0.5  # so that no pattern repeats, and every length is tried
    assert steady_period(done) == pytest.approx(2.0, rel=1e-4)


@pytest.fixture
def trials(tmp_path: Path) -> tuple[Any, Path]:
    """A problem, and the file of two rounds of trials of it."""
    path = tmp_path / "trials.jsonl"
    problem = layered(6)
    measured = Trials(problem, Biased(problem), path=path)
    measured.measure([[0] * 6, [1] * 6])
    measured.measure([[0] * 6, [0, 0, 0, 1, 1, 1]])
    return problem, path


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.pop("seconds"),
        lambda row: row.update(x=0),
        lambda row: row.update(seconds=[0.1]),
        lambda row: row.update(seconds=[0.1, "0.2"]),
        lambda row: row.update(seconds=[0.1, 0]),
        lambda row: row.update(seconds=[0.1, 1e300]),
        lambda row: row["placements"][0].pop(),
        lambda row: row["placements"][1].__setitem__(0, 2**31),
        lambda row: row["placements"][1].__setitem__(0, True),
        lambda row: row.update(placements=[]),
    ],
)
def test_a_round_of_trials_is_whole_or_refused(change: Any, trials: tuple[Any, Path]) -> None:
    problem, path = trials
    lines = path.read_text().splitlines()
    row = json.loads(lines[1])
    change(row)
    path.write_text("\n".join([lines[0], json.dumps(row), lines[2]]) + "\n")
    before = path.read_bytes()
    with pytest.raises(TrialError, match=r"line 2: .*delete the line"):
        Trials(problem, Biased(problem), path=path)
    assert path.read_bytes() == before, "nothing that was measured is lost"


def test_the_last_round_of_trials_may_be_cut_off(trials: tuple[Any, Path]) -> None:
    problem, path = trials
    path.write_bytes(path.read_bytes()[:-5])
    again = Trials(problem, Biased(problem), path=path)
    again.measure([[0] * 6, [1] * 6])
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("start_s", lambda a: a[0]),
        ("start_s", lambda a: a + np.nan),
        ("end_s", lambda a: -a),
        ("placement", lambda a: a + 7),
        ("transfers", lambda a: a + 9),
        ("transfer_end_s", lambda a: a[:-1]),
        ("peak_bytes", lambda a: a.astype(object)),
        ("head", lambda a: np.array(json.dumps(json.loads(str(a)) | {"round_s": -1.0}))),
        ("head", lambda a: np.array(json.dumps(json.loads(str(a)) | {"called_s": "now"}))),
    ],
)
def test_a_timeline_is_whole_or_refused(what: str, value: Any, tmp_path: Path) -> None:
    problem = layered(6)
    line = simulate(problem, [0, 1, 0, 1, 0, 1])
    assert len(line.transfer_end_s)
    line.save(tmp_path / "good.npz")
    assert Timeline.load(tmp_path / "good.npz").period_s == line.period_s
    with np.load(tmp_path / "good.npz") as data:
        arrays = dict(data)
    np.savez(tmp_path / "bad.npz", **arrays | {what: value(arrays[what])})
    with pytest.raises(TimelineError):
        Timeline.load(tmp_path / "bad.npz")


HOSTILE = {  # the command of each file, by how its name begins
    "bomb": ["plan", "tiny_mlp", "--planner", "heft", "--cluster", "FILE"],
    "redos": ["plan", "tiny_mlp", "--planner", "heft", "--cluster", "FILE"],
    "dnn": ["plan", "FILE", "--planner", "heft"],
    "onnx": ["plan", "FILE", "--planner", "heft"],
    "schedule": ["schedule", "FILE", *SCHEDULED],
    "rundir": ["report", "FILE", "--out", "page.html"],
    "policyseq": ["plan", "tiny_mlp", "--planner", "policy", "policy=FILE"],
}


def test_hostile_files_are_refused_in_a_line(shared, tmp_path, monkeypatch, says):
    monkeypatch.chdir(tmp_path)
    files = sorted((shared / "cases" / "hostile").iterdir())
    assert len(files) > 10
    for file in files:
        kind = re.split("[_.0-9]", file.name)[0]
        if kind != "trials":
            message = says.refused([x.replace("FILE", str(file)) for x in HOSTILE[kind]])
            assert file.name in message


def test_hostile_trials_are_refused_in_a_line(shared: Path, trials: tuple[Any, Path]) -> None:
    """They are of a problem of 38 operators on two devices that is not here."""
    problem, path = layered(38), trials[1]
    for file in sorted((shared / "cases" / "hostile").glob("trials_*.jsonl")):
        head, rest = file.read_text().split("\n", 1)
        head = head.replace(json.loads(head)["problem"], fingerprint(problem))
        path.write_text(head + "\n" + rest)
        with pytest.raises(TrialError, match=r"line \d: "):
            Trials(problem, Biased(problem), path=path)
