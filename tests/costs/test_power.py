"""Watts: meters that are known, joules by hand, the front of latency, period and energy."""

from __future__ import annotations

import itertools
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from placement.bounds import lower_bounds
from placement.cluster import Cluster, Device
from placement.costs import power
from placement.costs.power import Meter, PowerError
from placement.importers import problem_file
from placement.plan import load_plan, make_plan
from placement.planners import load as planner
from placement.problem import Problem, ProblemError
from placement.report import html, table
from placement.report.pareto import plot_pareto
from placement.report.table import pareto_front
from placement.runs.compare import compare
from placement.simulator import evaluate, score, simulate
from tests.problems import altered, random_problem, small_problem


def package(folder: Path, number: int, joules: float, wraps_at: float = 1000.0) -> Path:
    zone = folder / f"intel-rapl:{number}"
    zone.mkdir(parents=True)
    (zone / "name").write_text(f"package-{number}\n")
    (zone / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    (zone / "max_energy_range_uj").write_text(f"{wraps_at * 1e6:.0f}\n")
    return zone


def test_a_processor_has_a_meter_for_each_package_and_not_for_parts(tmp_path: Path) -> None:
    zone = package(tmp_path, 0, 7.5)
    part = package(tmp_path / "parts", 0, 3.0)
    part.rename(tmp_path / "intel-rapl:0:0")
    board = package(tmp_path, 1, 1.0)
    (board / "name").write_text("psys\n")
    (meter,) = power.rapl_meters(tmp_path)
    assert (meter.name, meter.kind, meter.read_j()) == ("package-0", "cpu", 7.5)
    (zone / "energy_uj").write_text("12500000\n")
    assert meter.since_j(7.5) == pytest.approx(5.0)
    (zone / "energy_uj").write_text("2500000\n")  # it began again at 1000 J
    assert meter.since_j(7.5) == pytest.approx(995.0)
    assert power.rapl_meters(tmp_path / "nothing") == ()


def test_a_counter_that_may_not_be_read_is_an_error_with_the_remedy(tmp_path, monkeypatch) -> None:
    zone, read = package(tmp_path, 0, 1.0), Path.read_text

    def refused(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(PowerError, match=f"sudo chmod -R a\\+r {zone}; or state busy_w and idle_w"):
        power.rapl_meters(tmp_path)
    monkeypatch.undo()
    (zone / "energy_uj").unlink()
    with pytest.raises(PowerError, match="energy_uj: cannot be read: No such file"):
        power.rapl_meters(tmp_path)


class NVMLError(Exception):
    pass


def nvml(**changes: Any) -> Any:
    device = {"Count": lambda: 2, "HandleByIndex": lambda i: i}
    device |= {"TotalEnergyConsumption": lambda handle: 5000 + handle}  # millijoules
    calls = {f"nvmlDeviceGet{name}": call for name, call in device.items()}
    calls |= {"NVMLError": NVMLError, "nvmlInit": lambda: None}
    return types.SimpleNamespace(**calls | changes)


def test_meters_are_of_the_gpus_that_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts all of them; CUDA's first here is NVML's second."""
    import torch

    seen = [types.SimpleNamespace(uuid="bb")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: seen[i])
    library = nvml(nvmlDeviceGetUUID=lambda handle: ["GPU-aa", b"GPU-bb"][handle])
    assert [(m.name, m.read_j()) for m in power.nvml_meters(library)] == [("cuda:0", 5.001)]
    seen[0].uuid = "unknown"  # of another machine: as they are numbered
    assert [m.name for m in power.nvml_meters(library)] == ["cuda:0", "cuda:1"]


def test_a_gpu_has_a_meter_of_its_own() -> None:
    meters = [(m.name, m.kind, m.read_j()) for m in power.nvml_meters(nvml())]
    assert meters == [("cuda:0", "cuda", 5.0), ("cuda:1", "cuda", 5.001)]

    def fails(*_: Any) -> None:
        raise NVMLError("Not Supported")

    assert power.nvml_meters(nvml(nvmlInit=fails)) == ()
    with pytest.raises(PowerError, match="cuda:0: NVML does not tell its energy: Not Supported"):
        power.nvml_meters(nvml(nvmlDeviceGetTotalEnergyConsumption=fails))


def test_watts_are_what_the_meters_count_while_nothing_runs_and_while_a_device_works() -> None:
    """A machine of 10 W at rest (20 W with its GPU), 2 s per reading.

             rest   cpu:0 works   cpu:1 works   cuda:0 works
    package  20 J   50 J          44 J          20 J
    cuda:0   20 J   20 J          20 J          220 J

    Each core has half of the 10 W; cpu:0 draws 25 - 10 more, cpu:1 22 - 10, the GPU 110 - 10.
    """
    now = {"t": 0.0, "package": 0.0, "cuda:0": 0.0}
    draws = {None: (10, 10), "cpu:0": (25, 10), "cpu:1": (22, 10), "cuda:0": (10, 110)}

    def run(device: Device | None, seconds: float) -> None:
        host, gpu = draws[None if device is None else device.name]
        now["t"] += seconds
        now["package"] += host * seconds
        now["cuda:0"] += gpu * seconds

    package = Meter("package-0", "cpu", lambda: now["package"])
    meters = (package, Meter("cuda:0", "cuda", lambda: now["cuda:0"]))
    devices = (Device("cpu:0"), Device("cpu:1"), Device("cuda:0", "cuda"))
    far = Device("far", like="cpu:0", busy_w=7.0, idle_w=3.0)
    by_hand: Any = {"work": run, "wait": lambda s: run(None, s), "clock": lambda: now["t"]}
    cluster = power.measured(Cluster("c", (*devices, far)), meters=meters, **by_hand)
    # "far" is a processor too, but described: it has no part of what the packages draw.
    watts = [(d.idle_w, d.busy_w, d.power_source) for d in cluster.devices]
    assert watts[:2] == [(5, 20, "measured"), (5, 17, "measured")]
    assert watts[2:] == [(10, 110, "measured"), (3.0, 7.0, "declared")]
    assert cluster.power_source == "declared"  # one of them is
    assert replace(cluster, devices=cluster.devices[:3]).power_source == "measured"
    assert Cluster("c", devices).power_source is None


def test_a_device_that_cannot_work_is_no_measurement() -> None:
    threads = torch.get_num_threads()
    with pytest.raises(PowerError, match=r"device 'cpu:0' cannot work here: .*Invalid argument"):
        power.keep_busy(Device("cpu:0", cores=(1023,), threads=1), 0.01)
    power.keep_busy(Device("cpu:0", threads=1), 0.01)
    assert torch.get_num_threads() == threads


def test_no_meter_says_what_to_do(tmp_path, says, monkeypatch) -> None:
    cluster = Cluster("c", (Device("a"),))
    with pytest.raises(PowerError, match=r"no power meter on this machine .* state busy_w"):
        power.measured(cluster, meters=())
    with pytest.raises(PowerError, match=r"seconds = 0"):
        power.measured(cluster, meters=(), seconds=0)
    monkeypatch.setattr(power, "rapl_meters", lambda: ())
    monkeypatch.setattr(power, "nvml_meters", lambda: ())
    assert "no power meter" in says(["doctor", "--power"], 2).err


def test_the_command_writes_a_cluster_that_can_be_used(tmp_path, says, monkeypatch) -> None:
    (tmp_path / "in.yaml").write_text("name: c\ndevices: [{name: a}, {name: b}]\n")
    clock = itertools.count()
    monkeypatch.setattr(power, "rapl_meters", lambda: (Meter("p", "cpu", lambda: next(clock)),))
    monkeypatch.setattr(power, "nvml_meters", lambda: ())
    out = tmp_path / "out.yaml"
    argv = ["doctor", "--power", "--cluster", tmp_path / "in.yaml"]
    argv += ["--seconds", "0.01", "--out", out]
    answer = says([*argv, "--json"]).json
    assert answer["power_source"] == "measured"
    assert [d["name"] for d in answer["devices"]] == ["a", "b"]
    again = Cluster.from_yaml(out)
    assert again.power_source == "measured"
    assert [d.idle_w for d in again.devices] == [d["idle_w"] for d in answer["devices"]]
    assert "measured" in says(argv).out


def test_the_source_is_part_of_a_cluster_only_where_it_was_measured() -> None:
    declared = Cluster("c", (Device("a", busy_w=2.0, idle_w=1.0),))
    measured = Cluster("c", (Device("a", busy_w=2.0, idle_w=1.0, power_source="measured"),))
    assert declared.fingerprint != measured.fingerprint
    # As it was when devices had no such field: profiles and plans stay valid.
    assert Cluster("c", (Device("a"),)).fingerprint.startswith("95f8817c87de2c24")


def chain(source: str = "declared", busy_w: float = 100.0, idle_w: float = 50.0) -> Problem:
    """Two operators of 3 s and 1 s on fast, of 6 s and 2 s on frugal; transfers are free."""
    watts = {"busy_w": [busy_w, 20.0], "idle_w": [idle_w, 5.0], "power_source": source}
    some = {"objective": "energy", "num_microbatches": 2, "max_in_flight": 2}
    names = ["fast", "frugal"]
    return small_problem([[3, 6], [1, 2]], [(0, 1)], devices=names, device=watts, **some)


def test_joules_by_hand() -> None:
    """x on fast, y on frugal, two micro-batches:

    fast    |x0.|x1.|  |      busy 6 of 8 s: 6 * 100 + 2 * 50 = 700 J
    frugal  |   |y0|  y1|     busy 4 of 8 s: 4 * 20 + 4 * 5   = 100 J
             0   3  5 6  8
    """
    timeline = simulate(chain(), [0, 1])
    assert timeline.makespan_s == 8.0
    assert timeline.busy_s.tolist() == [6.0, 4.0]
    assert timeline.energy_j == 800.0
    # All on fast: 8 s busy, frugal waits: 800 + 40. All on frugal: 16 s: 320 + 800.
    assert simulate(chain(), [0, 0]).energy_j == 840.0
    assert simulate(chain(), [1, 1]).energy_j == 1120.0


def test_seconds_have_a_price() -> None:
    # Per micro-batch:        joules  seconds   at 0, 35 and 300 J a second
    # x on fast, y on frugal  400     8 / 2     400   540   1600
    # all on fast             420     8 / 2     420   560   1620
    # all on frugal           560     16 / 2    560   840   2960
    every = [[0, 1], [0, 0], [1, 1]]
    assert score(chain(), every).tolist() == [400.0, 420.0, 560.0]
    weighted = replace(chain(), second_j=35.0)
    assert score(weighted, every).tolist() == [540.0, 560.0, 840.0]
    values = evaluate(weighted, every)
    assert values.energy_j.tolist() == [400.0, 420.0, 560.0]  # joules stay joules
    assert lower_bounds(weighted)["energy"] <= 540.0
    # A short run is worth its joules where seconds are dear.
    dear, cheap = replace(hurry(), second_j=1000.0), hurry()
    assert planner("single_device")(cheap).placement.tolist() == [1, 1]
    assert planner("single_device")(dear).placement.tolist() == [0, 0]
    assert planner("macro_search", evaluations=200)(dear).placement.tolist() == [0, 1]
    for price in (-1.0, np.nan, np.inf):
        with pytest.raises(ProblemError, match="second_j"):
            replace(chain(), second_j=price)


def test_a_price_on_the_command_line_is_kept_by_the_plan(tmp_path, says):
    file, plan = tmp_path / "problem.json", tmp_path / "plan.json"
    problem_file.save(hurry(), file)
    asked = ["plan", str(file), "--planner", "macro_search", "evaluations=200"]
    for price, value in (("0", 160.0), ("1000", 7050.0)):  # [1, 1]; [0, 1]: 3050 J and 4 s
        assert says([*asked, "--second-j", price, "--out", plan, "--json"]).json["value_s"] == value
        assert load_plan(plan).second_j == float(price)
    assert load_plan(plan).predicted.energy_j == 3050.0
    shown = says(["show", plan]).out
    assert "energy and 1000 J/s" in " ".join(shown.split())
    assert "weighted" in shown and "3050 J" in shown
    period = ["--objective", "period", "--second-j", "20"]  # a price counts where joules do
    assert "--second-j 20 is for --objective energy, not period" in says.error(*asked, *period)
    assert "--second-j -1.0: joules must be a number of at least 0" in says.error(
        *asked, "--second-j", "-1"
    )


def hurry() -> Problem:
    """The chain, with a fast device that needs ten times the power when it runs."""
    return chain(busy_w=1000.0, idle_w=0.0)


def test_a_comparison_marks_the_front_draws_it_and_says_that_watts_are_declared(tmp_path) -> None:
    """Per micro-batch:    latency  period  energy
    single:fast            4        4       420      on the front
    x on fast, y on frugal 5        3       400      on the front
    x on frugal, y on fast 7        6       497.5    behind the one before in everything
    single:frugal          8        8       560      too
    """

    def fixed(*on: int) -> Any:
        solve = planner("single_device")
        return lambda problem: replace(solve(problem), placement=np.array(on, np.int32))

    planners = {"split": fixed(0, 1), "swapped": fixed(1, 0)}
    comparison = compare({"chain": chain()}, planners, out_dir=tmp_path)
    marks = {r.planner: r.pareto for r in comparison.rows}
    assert marks == {"single:fast": True, "single:frugal": False, "split": True, "swapped": False}
    assert [r.energy_j for r in comparison.rows] == [420.0, 560.0, 400.0, 497.5]
    assert {r.energy_source for r in comparison.rows} == {"declared"}
    again = table.from_csv((tmp_path / "compare.csv").read_text())
    assert [r.pareto for r in again] == [r.pareto for r in comparison.rows]
    notes = table.tables(comparison)[0].notes
    assert notes[0] == "best trade-offs of latency, period and energy: single:fast, split"
    assert "declared watts" in notes[1]
    picture = plot_pareto(comparison, tmp_path / "pareto.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    html.write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert '"pareto":true' in page and '"power_source":"declared"' in page


def test_without_watts_the_front_is_of_latency_and_period(tmp_path: Path) -> None:
    problem = random_problem(5, 5, 2, objective="period")
    problem = altered(problem, {"busy_w": None, "idle_w": None})
    comparison = compare({"toy": problem}, {"heft": planner("heft")}, out_dir=tmp_path)
    assert any(r.pareto for r in comparison.rows)
    notes = table.tables(comparison)[0].notes
    assert notes[0].startswith("best trade-offs of latency and period: ")
    assert not any("watts" in note for note in notes)
    plot_pareto(comparison, tmp_path / "pareto.png")


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=8))
def test_the_front_is_what_nothing_dominates(points: list[tuple[int, int, int]]) -> None:
    def dominates(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
        return all(x <= y for x, y in zip(a, b, strict=True)) and a != b

    brute = [not any(dominates(q, p) for q in points) for p in points]
    assert pareto_front(points).tolist() == brute
    assert pareto_front([*points, (np.inf, 0, 0)]).tolist()[-1] is False


@pytest.mark.parametrize("source", ["declared", "measured"])
def test_a_plan_says_where_its_watts_come_from(tmp_path, says, source) -> None:
    problem = chain(source)
    plan = make_plan(problem, planner("single_device")(problem), planner="single_device")
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again.cluster.devices[0].power_source == source
    assert again.cluster.build().power_source == source
    stdout = says(["show", tmp_path / "plan.json"]).out
    assert ("declared watts" in stdout) == (source == "declared")
