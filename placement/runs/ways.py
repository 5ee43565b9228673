"""Ways to carry a plan out, checked and timed side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from placement.tools.threads import torch_threads

if TYPE_CHECKING:
    from placement.cluster import Cluster
    from placement.executor import Runner
    from placement.plan import Measured, Plan
    from placement.tools.progress import Progress

ROUNDS = 5

Way = tuple[Callable[[], Any], Callable[[], float]]  # a single call, and seconds of a period


def difference(runner: Runner, module: Any, inputs: Any) -> str:
    """How the runner's outputs differ from the plain module's; empty if they are close.

    The plain module runs with the threads of the devices: how a sum is split over threads
    decides its last digits, and many layers make more of them.
    """
    from placement.executor.equality import module_difference
    from placement.program import split_inputs

    args, kwargs = split_inputs(inputs)
    was_training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        with torch_threads(max(d.threads for d in runner.cluster.devices)):
            return module_difference(runner, module, args, kwargs, runner.cluster)
    finally:
        for m in was_training:
            m.training = True


def inferring(module: Any) -> Callable[..., Any]:
    """The module, called in inference mode."""
    import torch

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return module(*args, **kwargs)

    return call


@dataclass
class TorchCompiled:
    """A module as ``torch.compile`` makes it: call it as the module, without gradients.

    Attributes:
        what: what was asked for, and how long it took, in words.
        seconds: for this kind.
        replays: CUDA graphs, of which the next call writes over what this one made.
    """

    what: str
    seconds: float
    replays: bool
    _call: Callable[..., Any]
    _module: Any
    _frozen_as: list[Any]  # states of what has values that are compiled in

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from placement.executor.weights import states_of

        if self._frozen_as and states_of(_state(self._module)) != self._frozen_as:
            return self._run(self._module, args, kwargs)  # which knows what was written since
        return self.bare(*args, **kwargs)

    def bare(self, *args: Any, **kwargs: Any) -> Any:
        """As ``torch.compile`` made it: without a look at the weights, which takes its time."""
        return self._run(self._call, args, kwargs)

    def _run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        import torch
        from torch.utils import _pytree as pytree

        with torch.no_grad():
            if not self.replays:
                return call(*args, **kwargs)
            torch.compiler.cudagraph_mark_step_begin()
            outputs = call(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, torch.clone, outputs)


def torch_compiled(
    module: Any, inputs: Any, cluster: Cluster, report: Progress, mode: str = "reduce-overhead"
) -> TorchCompiled | None:
    """What a user would type first: the faster of ``torch.compile`` and the same with freezing.

    On a GPU with ``mode``. In CPU kernels PyTorch has the threads that it has in
    this process. None: it fails, or computes something else, which is said.
    """
    import torch
    from torch.utils import _pytree as pytree

    from placement.executor import equality
    from placement.executor.weights import states_of
    from placement.program import split_inputs
    from placement.tools.progress import say
    from placement.tools.shown import seconds

    args, kwargs = split_inputs(inputs)
    with torch.no_grad():
        expected = pytree.tree_leaves(module(*args, **kwargs))
    tolerance = equality.Tolerance.of([*module.parameters(), *expected], cluster)
    on_gpu = any(x.is_cuda for x in module.parameters())
    kinds: dict[str, Any] = {"torch.compile": {}, "torch.compile with freezing": {}}
    if on_gpu:
        kinds = {f'torch.compile(mode="{mode}")': {"mode": mode}}
    made: list[TorchCompiled] = []
    for name, options in kinds.items():
        report(f"{name} of the module", None)
        frozen, began = "freezing" in name, time.perf_counter()
        # Options that differ, or Dynamo would take the first one's code again.
        options |= {"options": {"freezing": True}} if frozen else {}
        try:
            # Dynamo asks the global setting.
            with torch._inductor.config.patch(freezing=frozen):
                one = TorchCompiled(name, 0.0, on_gpu, torch.compile(module, **options), module, [])
                one.bare(*args, **kwargs)
                outputs = pytree.tree_leaves(one.bare(*args, **kwargs))  # of a CUDA graph by now
                took_s = time.perf_counter() - began
                wrong = equality.difference(outputs, expected, tolerance)
        except Exception as error:  # of Dynamo, Inductor, the compiler or the model
            line = next(iter(str(error).splitlines()), "")[:200]
            say(f"{name} is left out: {type(error).__name__}: {line}")
            continue
        if wrong:
            say(f"{name} is left out: {wrong}")
            continue
        states = states_of(_state(module)) if frozen else []
        what = f"{name} ({seconds(took_s)} of compiling)"
        made.append(replace(one, what=what, seconds=took_s, _frozen_as=states))
    took = {id(one): float("inf") for one in made}
    for _ in range(ROUNDS):  # in turns
        for one in made:
            took[id(one)] = min(took[id(one)], timed(partial(one.bare, *args, **kwargs)))
    return min(made, key=lambda one: took[id(one)], default=None)


def _state(module: Any) -> list[Any]:
    """Freezing compiles buffers in too."""
    return [*module.parameters(), *module.buffers()]


def first_difference(runner: Runner, inputs: Any) -> str:
    """The first operator whose results on its device are not those of a plain call of it."""
    import numpy as np
    from torch.utils import _pytree as pytree

    from placement.capturing.numerics import difference
    from placement.executor import Runner
    from placement.program import Ref, run_program, split_inputs

    graph, program = runner.graph, runner.graph.program
    assert program is not None
    tensors = [t for step in program.steps for t in step.outputs]
    leaves, tree = tuple(map(Ref, tensors)), pytree.tree_structure(tensors)
    every = replace(program, output_leaves=leaves, out_tree=tree)
    flat = program.flatten_inputs(*split_inputs(inputs))
    expected = run_program(every, flat)
    shown = replace(graph, program=every, output_tensor=np.array(sorted(tensors), np.int32))
    place = np.atleast_2d(runner.placement)[0]
    with Runner(shown, runner.cluster, place) as watched:
        (got,) = watched.stream_tensors([flat])
    for t, a, b in zip(tensors, got, expected, strict=True):
        wrong = difference([a.cpu()], [b.cpu()])
        if wrong:
            n = int(graph.tensor_src[t])
            device = runner.cluster.device_names[place[n]]
            return (
                f"; first in operator {graph.op_name[n]!r} (module {graph.op_module[n]!r}) on "
                f"{device!r}, whose {wrong}"
            )
    return "; no operator by itself differs by more than rounding, which its successors enlarge"


def alone(plan: Plan, runner: Runner, device: str) -> Runner:
    """The same program on one device."""
    import numpy as np

    from placement.executor import Runner

    placement = np.full(runner.graph.num_ops, runner.cluster.index(device), np.int32)
    options: Any = {"max_in_flight": plan.max_in_flight, "priority": plan.priority}
    single = Runner(runner.graph, runner.cluster, placement, **options)
    single.outputs_stay = runner.outputs_stay
    single.cuda_graphs, single.compiled = plan.cuda_graphs, runner.compiled
    return single


def compiled_in_words(runner: Runner) -> str:
    """How many runs of operators are compiled, what that took, and which are not."""
    from placement.tools.files import some
    from placement.tools.shown import byte_size, count, seconds

    said = f"{count(runner.num_compiled, 'run')} of operators compiled"
    if runner.compile_s:
        said += f" in {seconds(runner.compile_s)}"
    if runner.packed_bytes:
        said += f", {byte_size(runner.packed_bytes)} of packed weights"
    if others := [f"from {name!r} on: {why}" for name, why in runner.not_compiled.items()]:
        said += f"; as they are, {some(others, '; ', 3)}"
    return said


def calls(one: Runner, many: Runner, inputs: Any, batches: int) -> Way:
    """A single call of ``one``, and the period of a stream through ``many``.

    What comes back (``Program.comes_back``) is given where the first call left it.
    """
    from placement.program import split_inputs

    later: list[Any] = []

    def given() -> Any:
        if not later:
            later.append(_later(one, inputs))
        return later[0]

    def once() -> None:
        args, kwargs = split_inputs(given())
        one(*args, **kwargs)

    def often() -> float:
        return many.period_of(many.stream([given()] * batches))

    return once, often


def _later(runner: Runner, inputs: Any) -> Any:
    """The inputs with what comes back as a call returns it."""
    from torch.utils import _pytree as pytree

    from placement.program import Ref, split_inputs

    program = runner.graph.program
    if not program.comes_back:
        return inputs
    args, kwargs = split_inputs(inputs)
    outputs = pytree.tree_leaves(runner(*args, **kwargs))
    pairs = zip(program.output_leaves, outputs, strict=True)
    made = {leaf.tensor: value for leaf, value in pairs if isinstance(leaf, Ref)}
    given = zip(program.input_tensors, program.flatten_inputs(args, kwargs), strict=True)
    back = dict(program.comes_back)
    swap = {id(value): made[back[t]] for t, value in given if t in back}
    return pytree.tree_map(lambda x: swap.get(id(x), x), inputs)


def measure(ways: dict[str, Way], report: Progress) -> dict[str, Measured]:
    """Latency of single calls, and periods; the ways to run take turns, round by round."""
    import platform

    import numpy as np

    from placement.plan import Measured, Spread, now

    latency: dict[str, list[float]] = {name: [] for name in ways}
    periods: dict[str, list[float]] = {name: [] for name in ways}
    for r in range(-1, ROUNDS):  # round -1 warms up
        for name, (once, often) in ways.items():
            report(f"measuring, round {max(r, 0) + 1} of {ROUNDS}", max(r, 0) / ROUNDS)
            one = float(np.median([timed(once) for _ in range(3)]))
            many = often()
            if r >= 0:
                latency[name].append(one)
                periods[name].append(many)
    facts: dict[str, Any] = {"n": ROUNDS, "when": now(), "machine": platform.node()[:200]}
    spreads = {n: (Spread.of(latency[n]), Spread.of(periods[n])) for n in ways}
    return {n: Measured(latency_s=a, period_s=b, **facts) for n, (a, b) in spreads.items()}


def one_by_one(
    ways: dict[str, Way], runners: Mapping[str, Runner], report: Progress
) -> dict[str, Measured]:
    """``measure`` where a GPU has room for one of the ``runners`` at a time, by way."""
    measured: dict[str, Measured] = {}
    for name in [*ways]:
        measured |= measure({name: ways.pop(name)}, report)  # with what it keeps on a device
        if name in runners:
            runners[name].release()
    return measured


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
