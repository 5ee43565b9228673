"""Draw the pictures of the documentation from the code that they are about.

    python docs/make_pictures.py [NAME ...]

Nothing is measured: every picture is of fixed times, so that it comes out the same everywhere.
That of a measured run is not among them: ``python -m experiments.pipelining`` draws it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from placement import (
    Cluster,
    Device,
    Link,
    OpGraph,
    Problem,
    Profile,
    Timeline,
    capture,
    schedulers,
    simulate,
)
from placement.graph import levels
from placement.workloads import load

IMAGES = Path(__file__).parent / "img"
INK, FAINT, LANE = "#22272e", "#6e7781", "#f1f3f5"
RED = "#c8553d"
DEVICES = ("#3b6fb6", "#f2a541", "#4aa57c")
BATCHES = (*DEVICES, RED)
TEXT = ("white", INK, "white", "white")
WIDTH = 8.4  # inches: two thirds of a page


def graph() -> Figure:
    """The captured operators of a small model, coloured by a placement."""
    module, inputs = load("tiny_branches")
    captured = capture(module, inputs, name="tiny_branches")
    level = levels(captured.edges, captured.num_ops)
    rows = [np.flatnonzero(level == depth) for depth in range(level.max() + 1)]
    at = {
        int(op): (float(depth), k - (len(row) - 1) / 2)
        for depth, row in enumerate(rows)
        for k, op in enumerate(row)
    }
    names = ("cpu:0", "cpu:1")
    links = (Link(*names, 0.1), Link(*names[::-1], 0.1))
    # A second for an operator with parameters, a quarter for the others.
    seconds = np.full((captured.num_ops, 2), 0.25)
    seconds[captured.param_use_op] = 1.0
    problem = _problem(captured, names, seconds, links, 1).with_objective("latency")
    from placement.planners import load as planner

    placement = planner("heft")(problem).placement
    high = max(abs(y) for _, y in at.values())
    figure = Figure(figsize=(WIDTH, 1.4 + 0.9 * high), layout="constrained")
    axis = figure.subplots()
    for src, dst in captured.edges.tolist():
        (x, y), (u, v) = at[src], at[dst]
        crosses = placement[src] != placement[dst]
        arrow = {"arrowstyle": "-|>", "color": RED if crosses else FAINT}
        arrow |= {"lw": 1.8 if crosses else 1.0, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", (u - 0.40, v + 0.12 * np.sign(y - v)), (x + 0.40, y), arrowprops=arrow)
    for op, (x, y) in at.items():
        d, shape = placement[op], "round,pad=0,rounding_size=0.08"
        corner = (x - 0.39, y - 0.2)
        axis.add_patch(FancyBboxPatch(corner, 0.78, 0.4, shape, lw=0, facecolor=DEVICES[d]))
        _write(axis, x, y, captured.op_name[op], TEXT[d], 7.5)
    for d, name in enumerate(names):
        box = {"facecolor": DEVICES[d], "lw": 0, "boxstyle": "round,pad=0.3"}
        axis.text(d * 0.9 - 0.39, high + 0.75, name, fontsize=9, color=TEXT[d], bbox=box)
    sent = "red: a tensor that is sent to the other device"
    axis.text(1.9 - 0.39, high + 0.75, sent, fontsize=9, color=RED)
    axis.set_xlim(-0.5, level.max() + 0.5)
    axis.set_ylim(-high - 0.4, high + 1.1)
    axis.set_axis_off()
    return figure


def timeline() -> Figure:
    """The example of ``concepts.md``: the chain a, b, c on two devices."""
    problem = _chain(max_in_flight=2)
    simulated = simulate(problem, [0, 0, 1], num_microbatches=3)
    figure = Figure(figsize=(WIDTH, 1.9), layout="constrained")
    axis = figure.subplots()
    _draw(axis, simulated, [["a", "b", "c"][n] for n in range(3)], {(0, 1): "one → two"})
    _ruler(axis, "seconds", int(simulated.makespan_s))
    return figure


def in_flight() -> Figure:
    """The same chain with two and with three micro-batches in flight."""
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    for axis, window in zip(figure.subplots(2, 1, sharex=True), (2, 3), strict=True):
        simulated = simulate(_chain(max_in_flight=window), [0, 0, 1], num_microbatches=6)
        period = simulate(_chain(max_in_flight=window), [0, 0, 1]).period_s
        _draw(axis, simulated, None, {(0, 1): "one → two"})
        _title(axis, f"{window} micro-batches in flight", f"period {period:g} s")
        _ruler(axis, "", 25)
    axis.set_xlabel("seconds", fontsize=9, color=FAINT)
    return figure


def schedules() -> Figure:
    """Orders of a training step through three devices: backward takes 2 s."""
    problem = _step([0, 1, 2], [1.0, 1.0, 1.0])
    names = {"gpipe": "GPipe", "one_f_one_b": "1F1B"}
    return _orders(problem, [0, 1, 2, 2, 1, 0], 4, names)


def searched() -> Figure:
    """The same for pieces of 4, 1, 1 and 4 s that visit two devices in turns, inference."""
    problem = _step([0, 1, 0, 1], [4.0, 1.0, 1.0, 4.0], training=False)
    names = {"gpipe": "GPipe", "one_f_one_b": "1F1B", "searched": "searched"}
    return _orders(problem, [0, 1, 0, 1], 4, names)


def _orders(problem: Problem, where: list[int], num: int, names: dict[str, str]) -> Figure:
    placement = np.array(where, np.int32)
    lanes = problem.num_devices
    figure = Figure(figsize=(WIDTH, 0.4 + (0.5 + 0.36 * lanes) * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, sharex=True)
    timelines = {}
    for name in names:
        schedule = schedulers.load(name)(problem, placement, num)
        timelines[name] = simulate(problem, placement, schedule)
    end = int(max(f.makespan_s for f in timelines.values()))
    backward = problem.graph.is_backward
    for axis, (name, title) in zip(panels, names.items(), strict=True):
        _draw(axis, timelines[name], None, {}, faded=~backward if backward.any() else None)
        said = f"{timelines[name].makespan_s:g} s"
        if backward.any():
            said += (
                f", at most {_stored(timelines[name], backward)} micro-batches stored on a device"
            )
        _title(axis, title, said)
        _ruler(axis, "", end)
    kind = "seconds; pale is forward, full is backward" if backward.any() else "seconds"
    panels[-1].set_xlabel(kind, fontsize=9, color=FAINT)
    return figure


def _stored(run: Timeline, backward: np.ndarray) -> int:
    """Most micro-batches whose forward has begun on a device and whose backward has not ended."""
    most = 0
    for device in range(len(run.device_names)):
        here = run.placement == device
        begun = run.start_s[:, here & ~backward].min(axis=1)
        over = run.end_s[:, here & backward].max(axis=1)
        most = max(most, *(int(((begun <= t) & (t < over)).sum()) for t in begun))
    return most


def sharing() -> Figure:
    """One tensor for two readers on a device, and two pairs of devices that share a bus."""
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    for axis, channel in zip(figure.subplots(2, 1, sharex=True), (None, "bus"), strict=True):
        simulated = simulate(_fork(channel), [0, 1, 1, 2, 2], num_microbatches=1)
        label = "one bus for all" if channel else "a channel for each pair of devices"
        _draw(axis, simulated, list("abcde"), {(0, 1): "zero → one", (0, 2): "zero → two"})
        _title(axis, label, f"latency {simulated.latency_s:g} s")
        _ruler(axis, "", 10)
    axis.set_xlabel("seconds", fontsize=9, color=FAINT)
    return figure


def _chain(max_in_flight: int) -> Problem:
    uses, sizes = [(0, 0), (1, 1), (2, 2)], [40, 40, 100, 40]
    drawn = OpGraph.build("chain", list("abc"), [-1, 0, 1, 2], sizes, uses, output_tensor=[3])
    seconds = np.array([[2.0, 2.0], [1.0, 1.0], [3.0, 3.0]])
    links = (Link("one", "two", 1.0), Link("two", "one", 1.0))
    return _problem(drawn, ("one", "two"), seconds, links, max_in_flight)


def _step(where: list[int], forward_s: list[float], training: bool = True) -> Problem:
    """Pieces one after another, and back again at twice the seconds; tensors weigh nothing."""
    count = len(where)
    n = 2 * count if training else count
    names = [f"{'fb'[i >= count]}{min(i, n - 1 - i) if training else i}" for i in range(n)]
    uses = [(i, i + 1) for i in range(n - 1)]
    uses += [(i, n - 1 - i) for i in range(count - 1)] if training else []
    drawn = OpGraph.build(
        "step", names, range(n), [0] * n, sorted(uses), is_backward=[i >= count for i in range(n)]
    )
    seconds = np.array(forward_s + ([2 * x for x in forward_s[::-1]] if training else []))
    devices = tuple(f"device {d}" for d in range(max(where) + 1))
    return _problem(drawn, devices, np.repeat(seconds[:, None], len(devices), axis=1), (), 4)


def _fork(channel: str | None) -> Problem:
    """Operator a makes one tensor, which b and c read on device one, d and e on device two."""
    uses, outputs = [(0, n) for n in range(1, 5)], range(1, 5)
    drawn = OpGraph.build("fork", list("abcde"), range(5), [2] * 5, uses, output_tensor=outputs)
    names = ("zero", "one", "two")
    links = tuple(Link(a, b, 0.0, 1.0, channel=channel) for a in names for b in names if a != b)
    return _problem(drawn, names, np.repeat([[1.0], [2.0], [1.0], [2.0], [1.0]], 3, 1), links, 1)


def _problem(
    drawn: OpGraph,
    names: tuple[str, ...],
    seconds: np.ndarray,
    links: tuple[Link, ...],
    max_in_flight: int,
) -> Problem:
    cluster = Cluster("of the documentation", tuple(Device(n, memory_bytes=10**6) for n in names))
    profile = Profile(names, seconds, np.zeros_like(seconds), links)
    return Problem(drawn, cluster, profile, max_in_flight=max_in_flight)


def _draw(
    axis: Axes,
    run: Timeline,
    op_label: list[str] | None,
    channels: dict[tuple[int, int], str],
    faded: np.ndarray | None = None,
) -> None:
    """A lane per device, and per pair of devices in ``channels``; a colour per micro-batch."""
    lanes = [*run.device_names, *channels.values()]
    for lane in range(len(lanes)):
        axis.axhspan(lane - 0.38, lane + 0.38, color=LANE, lw=0, zorder=0)
    for batch in range(run.num_microbatches):
        colour = BATCHES[batch % len(BATCHES)]
        for op, lane in enumerate(run.placement):
            begin, end = run.start_s[batch, op], run.end_s[batch, op]
            pale = faded is not None and faded[op]
            _bar(axis, lane, begin, end, colour, 0.35 if pale else 1.0)
            number = batch if run.num_microbatches > 1 or not op_label else ""
            text = f"{op_label[op] if op_label else ''}{number}"
            _write(axis, (begin + end) / 2, lane, text, INK if pale else TEXT[batch % len(TEXT)])
    for row, (_, batch, src, dst) in enumerate(run.transfers.tolist()):
        if (src, dst) in channels:
            lane = len(run.device_names) + [*channels].index((src, dst))
            begin, end = run.transfer_start_s[row], run.transfer_end_s[row]
            _bar(axis, lane, begin, end, BATCHES[batch % len(BATCHES)], 0.6, 0.24)
            text = f"{batch}" if run.num_microbatches > 1 else "a"
            _write(axis, (begin + end) / 2, lane, text, INK)
    axis.set_yticks(range(len(lanes)), lanes, fontsize=9, color=INK)
    axis.set_ylim(len(lanes) - 0.5, -0.55)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)
    axis.set_axisbelow(True)


def _bar(
    axis: Axes, lane: int, begin: float, end: float, colour: str, alpha: float, half: float = 0.38
) -> None:
    span, height = [(begin + 0.03, end - begin - 0.06)], (lane - half, 2 * half)
    axis.broken_barh(span, height, facecolor=colour, alpha=alpha, lw=0)


def _write(axis: Axes, x: float, y: float, text: str, colour: str, size: float = 8) -> None:
    axis.text(x, y, text, ha="center", va="center", fontsize=size, color=colour)


def _title(axis: Axes, left: str, right: str) -> None:
    axis.set_title(left, loc="left", fontsize=10, color=INK, pad=3)
    axis.set_title(right, loc="right", fontsize=9, color=FAINT, pad=3)


def _ruler(axis: Axes, label: str, end: int) -> None:
    axis.set_xlim(0, end)
    axis.set_xticks(range(end + 1))
    axis.tick_params(axis="x", colors=FAINT, labelsize=8)
    axis.set_xlabel(label, fontsize=9, color=FAINT)


PICTURES: dict[str, Callable[[], Figure]] = {
    "graph": graph,
    "timeline": timeline,
    "in_flight": in_flight,
    "schedules": schedules,
    "searched": searched,
    "sharing": sharing,
}


def draw(name: str, folder: Path = IMAGES) -> Path:
    """Write ``folder/NAME.svg``; the same picture gives the same file."""
    path = folder / f"{name}.svg"
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        PICTURES[name]().savefig(path, facecolor="white", metadata={"Date": None, "Creator": None})
    return path


if __name__ == "__main__":
    for chosen in sys.argv[1:] or PICTURES:
        print(draw(chosen))
