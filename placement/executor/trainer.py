"""``Trainer``: a captured training step on the devices of this machine, step after step.

A step runs its micro-batches through the pipeline. Gradients are added up where the backward
operators run; then every device updates the parameters whose gradients it holds, all devices at
the same time, with an optimizer of the caller's class and settings.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from placement.capturing.training import flatten_example, looks_at_all, optimizer_like
from placement.cluster import Cluster
from placement.executor.loader import Dataset, InputPipeline
from placement.executor.runner import Runner, RunnerError
from placement.graph import OpGraph
from placement.problem import Problem
from placement.profile import Profile
from placement.program import check_captured
from placement.schedule import Schedule


@contextmanager
def _lasting() -> Iterator[None]:
    """Outside of ``torch.inference_mode``: nobody may write later to what is made there."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class Trainer:
    """Trains a module that was captured with ``mode="training"``, in place.

    The module's own parameters and buffers are trained where devices compute in host memory;
    what other devices hold is copied back by ``sync`` (and on leaving the context).

    A step equals plain PyTorch's ``loss.backward()`` for each micro-batch, the mean of the
    gradients over the micro-batches, and ``optimizer.step()``. Batch normalisation updates its
    running statistics in the order of the micro-batches, as plain PyTorch does. Dropout draws
    from the generator of the device that runs it, in the order in which operators happen to
    run: masks are random, but not those of a plain run with the same seed.

    ``trainer.runner.cuda_graphs = True`` before the first step, as for ``Runner``: what a GPU does
    of a micro-batch is launched at once, unless it draws random numbers.

    Args:
        graph: from ``placement.capture(..., mode="training")``.
        cluster: devices of this machine.
        placement: int32 ``[N]`` device of each operator, or ``[K, N]``: replicas take turns, and
            what they have added up is added before every update, where phase 0 adds up.
        optimizer: over the module's parameters; settings (e.g. of a learning-rate scheduler) and
            groups are read at every step, its state is kept up to date by ``sync``. It must treat
            every parameter by itself (SGD, Adam, AdamW, RMSprop, ...; not LBFGS).
        max_in_flight: at most this many micro-batches between first operator and last, which
            bounds the stored activations.
        priority: int32 ``[N]`` as for ``Runner``.
        schedule: a fixed order; steps then take exactly its number of micro-batches.
        record: keep what a measured ``Timeline`` needs.
        make_runner: called like ``Runner``, which it is by default.

    Raises:
        RunnerError: the graph is not of a training step, colocated operators are on different
            devices, or the optimizer cannot be used.
        CaptureError: the optimizer keeps parameters beside its groups.
        ScheduleError: the schedule does not fit, or deadlocks.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        placement: ArrayLike,
        optimizer: torch.optim.Optimizer,
        *,
        max_in_flight: int = 4,
        priority: ArrayLike | None = None,
        schedule: Schedule | None = None,
        record: bool = False,
        make_runner: Callable[..., Runner] = Runner,
    ) -> None:
        check_captured(graph, cluster, RunnerError)
        if not graph.program.gradients:
            raise RunnerError(
                f"graph {graph.name!r} is no training step; capture it: "
                "placement.capture(module, inputs, mode='training')"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise RunnerError(f"a {type(optimizer).__name__} is given, not a torch.optim.Optimizer")
        if looks_at_all(optimizer):
            raise RunnerError(
                f"{type(optimizer).__name__} changes a parameter by what the gradients of others "
                "are, which may lie on other devices: use an optimizer that treats every parameter "
                "by itself, e.g. torch.optim.AdamW"
            )
        self.graph = graph
        self.optimizer = optimizer
        self._schedule = schedule
        seconds = np.zeros((graph.num_ops, cluster.num_devices))
        problem = Problem(graph, cluster, Profile(cluster.device_names, seconds, seconds))
        p = problem.check_placement(placement)
        if schedule is not None:
            max_in_flight = schedule.num_microbatches
        self.runner = make_runner(
            graph,
            cluster,
            p,
            max_in_flight=max_in_flight,
            priority=priority,
            schedule=schedule,
            record=record,
            own_buffers=True,
        )
        self._program = graph.program
        first = np.atleast_2d(p)[0]
        self._home = {q: int(first[graph.tensor_src[t]]) for q, t in graph.program.gradients}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._updated: dict[int, Tensor] = {}  # by parameter: what they update
        self._members: list[list[int]] = []
        self._known_state: Any = None  # the optimizer's, as it was read or written last
        self._num_added = 0
        self._shown: list[int] = []  # parameters whose ``.grad`` is what ``accumulate`` gave them
        me = weakref.ref(self)
        self._hooks = (
            optimizer.register_state_dict_pre_hook(lambda _: _write_state(me)),
            optimizer.register_step_pre_hook(partial(_check_step, me)),
        )
        # What the step was captured with; of what has no gradient it may have been either.
        trained, params = {q for q, _ in graph.program.gradients}, graph.program.params
        known = any(params[q].requires_grad for q in trained)
        self._is_trained = [
            x.requires_grad or (known and q in trained) for q, x in enumerate(params)
        ]

    def step(self, microbatches: Iterable[Any]) -> Tensor:
        """One optimizer step on the mean gradient of ``microbatches``; their losses, ``[M]``.

        Each is what the graph was captured with as example inputs (with a loss function: a pair
        of inputs and target), taken from the iterable as the pipeline has room.

        Raises:
            InputError: a micro-batch unlike the example.
            RunnerError: none given, or not as many as the schedule has.
            Exception: what an operator or the iterable raised; the gradients are forgotten.
        """
        losses = self._accumulate(microbatches)
        self.update()
        return losses

    def train(
        self,
        loader: Iterable[Any] | Dataset,
        num_microbatches: int,
        **options: Any,
    ) -> Iterator[Tensor]:
        """A step for every ``num_microbatches`` items of ``loader``; the losses of each, ``[M]``.

        Items are loaded as ``Runner.stream`` does, with its ``options``, also for the next step
        while one runs. The last step may have fewer; with a schedule such a rest is left out.

        Raises:
            LoaderError: an impossible number of workers or of items to prefetch.
            RunnerError: an impossible number of micro-batches.
        """
        if num_microbatches < 1:
            raise RunnerError(f"num_microbatches = {num_microbatches}, must be at least 1")
        if self._schedule is not None and num_microbatches != self._schedule.num_microbatches:
            raise RunnerError(
                f"num_microbatches = {num_microbatches}, but the schedule is for "
                f"{self._schedule.num_microbatches}"
            )
        return self._train(self.runner.load_ahead(loader, **options), num_microbatches)

    def _train(self, items: InputPipeline, num_microbatches: int) -> Iterator[Tensor]:
        with items:
            for first in items:
                step: Iterable[Any] = chain([first], islice(items, num_microbatches - 1))
                if self._schedule is not None:
                    step = whole = list(step)
                    if len(whole) < num_microbatches:
                        return
                yield self.step(step)

    @_lasting()
    def accumulate(self, microbatches: Iterable[Any]) -> Tensor:
        """Forward and backward of ``microbatches`` without an update; their losses, ``[M]``.

        Until ``update`` every trained parameter has ``.grad``, the mean of all that was
        accumulated. What is done to it counts: clipping by norm, ``optimizer.zero_grad()``.

        Raises: as ``step``.
        """
        losses = self._accumulate(microbatches)
        for q, mean in self._means().items():
            param = self._program.params[q]
            param.grad = mean.to(param.device)
            self._shown.append(q)
        return losses

    @_lasting()
    def _accumulate(self, microbatches: Iterable[Any]) -> Tensor:
        self._take_shown(self._num_added)
        self._check_unchanged()
        flat = (flatten_example(self._program, x) for x in microbatches)
        losses = []
        try:
            for loss in self.runner.stream_tensors(flat):
                losses.append(loss.detach().clone().reshape(()))
            if not losses:
                raise RunnerError("no micro-batches given: a step needs at least one")
        except BaseException:
            self.zero_gradients()
            raise
        self._num_added += len(losses)
        return torch.stack(losses)

    def gradients(self) -> dict[str, Tensor]:
        """The mean of what was accumulated since the last update, by parameter, in host memory."""
        names, params = self._program.param_names, self._program.params
        means = {q: params[q].grad for q in self._shown} if self._shown else self._means()
        return {names[q]: g.clone().cpu() for q, g in means.items() if g is not None}

    def _means(self) -> dict[int, Tensor]:
        self._add_up()
        count = max(self._num_added, 1)
        return {q: (g / count).cpu() for q, g in self.runner.gradients.items()}

    def _take_shown(self, count: int) -> None:
        """Parameters have no ``.grad`` any more; where it was changed, ``count`` times it is added.

        Raises:
            RunnerError: parameters of the optimizer have none, but others have one.
        """
        if not self._shown:
            return
        params, names = self._program.params, self._program.param_names
        updated = {id(x) for group in self.optimizer.param_groups for x in group["params"]}
        now = {q: params[q].grad for q in self._shown}
        gone = [q for q, g in now.items() if g is None and id(params[q]) in updated]
        left = {q: g for q, g in now.items() if g is not None}
        if gone and any(id(params[q]) in updated for q in left):
            raise RunnerError(
                f"{names[gone[0]]!r} has lost the .grad that trainer.accumulate gave it, others "
                "have theirs: leave all of them, or call optimizer.zero_grad() to forget all"
            )
        if gone:
            self.zero_gradients()
            return
        before = self._means()
        if not any(g.any() for g in left.values()) and any(before[q].any() for q in left):
            self.zero_gradients()  # as zero_grad(set_to_none=False) forgets them
            return
        if any(not torch.equal(g.cpu(), before[q]) for q, g in left.items()):
            self._replace({q: g.cpu() * count for q, g in left.items()})
            self._num_added = count
        self._hide()

    def _hide(self) -> None:
        for q in self._shown:
            self._program.params[q].grad = None
        self._shown = []

    def _replace(self, sums: Mapping[int, Tensor]) -> None:
        """Go on from these sums, in host memory, instead of what was added up."""
        for q, total in sums.items():
            if (mine := self.runner.gradients.get(q)) is not None:
                mine.copy_(total)
        synchronize(self.runner.gradients.values())

    def zero_gradients(self) -> None:
        """Forget what was accumulated."""
        self._hide()
        sums = (*self.runner.gradients.values(), *self.runner.partial.values())
        synchronize(sums)  # what a device that was stopped has begun
        for g in sums:
            g.zero_()
        synchronize(sums)
        self._num_added = 0

    def _add_up(self) -> None:
        """What replicas have added up, each by itself, to the rest; between runs."""
        if not self.runner.partial:
            return
        sums = (*self.runner.gradients.values(), *self.runner.partial.values())
        synchronize(sums)
        for (_, q), part in self.runner.partial.items():
            if (total := self.runner.gradients.get(q)) is not None:  # else it is added up elsewhere
                total.add_(part.to(total.device))
                part.zero_()
        synchronize(sums)

    @_lasting()
    def update(self) -> None:
        """One optimizer step with the mean of the accumulated gradients.

        Raises:
            RunnerError: nothing was accumulated.
            Exception: what the optimizer raised; the gradients are forgotten.
        """
        self._take_shown(1)
        if self._num_added == 0:
            raise RunnerError("there are no gradients: call accumulate(microbatches), or step")
        self._check_unchanged()
        try:
            self._apply_means()
        except BaseException:  # some devices are done with theirs, others are not
            Trainer.zero_gradients(self)
            raise

    def _apply_means(self) -> None:
        self.runner.call_on({})  # reads parameters again whose memory is another now
        if self._is_stale():
            self._write_state()
            self._optimizers = self._split_optimizer()
            self._known_state = self.optimizer.state
        self._add_up()
        updates = {}
        for d in set(self._home.values()):
            mine = [self.runner.gradients[q] for q, home in self._home.items() if home == d]
            own = self._optimizers.get(d)
            for group in own.param_groups if own is not None else ():
                settings = self.optimizer.param_groups[group["number"]]
                group.update({k: v for k, v in settings.items() if k != "params"})
            updates[d] = _update(own, mine, self._num_added)
        self.runner.call_on(updates)
        for own in self._optimizers.values():  # counters of groups
            for group in own.param_groups:
                settings = self.optimizer.param_groups[group["number"]]
                settings.update({k: v for k, v in group.items() if k not in ("params", "number")})
        self.optimizer._opt_called = True  # type: ignore[attr-defined] # schedulers warn otherwise
        self._num_added = 0
        self._spread()
        # One in the same memory is one from now on: a step of plain PyTorch may come between.
        self._write_state(here_only=True)

    def _check_unchanged(self) -> None:
        """What the step was captured with, and what would be lost.

        Raises:
            RunnerError: a parameter became frozen or trained, the optimizer has hooks, or a
                parameter has a gradient already.
        """
        own, program = self.optimizer, self._program
        trained = {id(program.params[q]): program.param_names[q] for q, _ in program.gradients}
        for x in (x for group in own.param_groups for x in group["params"]):
            name = trained.get(id(x), "")
            if x.grad is not None and (not name or x.grad.any()):
                raise RunnerError(
                    f"{name or 'a parameter of the optimizer'!r}, of shape {tuple(x.shape)}, has a "
                    ".grad, which plain PyTorch would use in this step, but a Trainer keeps "
                    "gradients of its own: call optimizer.zero_grad() first"
                )
        for q, (x, before) in enumerate(zip(self._program.params, self._is_trained, strict=True)):
            if x.requires_grad != before:
                raise RunnerError(
                    f"{self._program.param_names[q]!r} has requires_grad={x.requires_grad} now, "
                    "but the step was captured otherwise: capture the module again, and make "
                    "another Trainer"
                )
        before_step = own._optimizer_step_pre_hooks.values()
        others = any(getattr(hook, "func", None) is not _check_step for hook in before_step)
        if others or own._optimizer_step_post_hooks:
            raise RunnerError(
                "the optimizer has a hook on its step, which would not run, as every device makes "
                "a step of its own: remove it, and do what it does between "
                "trainer.accumulate(microbatches) and trainer.update()"
            )

    def _is_stale(self) -> bool:
        """Whether the devices' optimizers are not for this state, these groups or this memory."""
        return (
            not self._optimizers
            or self._known_state is not self.optimizer.state
            or self._members != _members(self.optimizer)
            or any(x is not self._trained(q) for q, x in self._updated.items())
        )

    def _split_optimizer(self) -> dict[int, torch.optim.Optimizer]:
        """For every device an optimizer of the parameters whose gradients it holds."""
        optimizers = {}
        self._updated, self._members = {}, _members(self.optimizer)
        for d in set(self._home.values()):
            groups, states = [], {}
            for number, group in enumerate(self.optimizer.param_groups):
                members = {id(x) for x in group["params"]}
                mine = []
                for q, home in self._home.items():
                    original = self._program.params[q]
                    if home == d and id(original) in members:
                        here = self._trained(q)
                        here.grad = self.runner.gradients[q]
                        self._updated[q] = here
                        mine.append(here)
                        if original in self.optimizer.state:
                            states[here] = self._moved(self.optimizer.state[original], here)
                if mine:
                    groups.append({**group, "params": mine, "number": number})
            if groups:
                optimizers[d] = optimizer_like(self.optimizer, groups)
                optimizers[d].state.update(states)
        if not optimizers:
            raise RunnerError(
                "the optimizer has none of the parameters that were captured: make it from the "
                "parameters() of the captured module"
            )
        return optimizers

    def _trained(self, q: int) -> Tensor:
        """Parameter ``q`` where it is updated."""
        return self.runner.loaded[self.runner.gradients[q].device, q]

    def _spread(self) -> None:
        """Bring new values to other kinds of memory where operators read the parameter too."""
        copied: list[Tensor] = []
        for (device, q), value in self.runner.loaded.items():
            if q in self._home and device != self.runner.gradients[q].device:
                value.copy_(self._trained(q))
                copied += (value, self._trained(q))
        synchronize(copied)

    def sync(self) -> None:
        """Bring the module and the optimizer's state up to date."""
        with torch.no_grad():
            self.runner.trained.refresh()  # what was written to the module since is not lost
            # Where loading ended early, for lack of memory, some gradients were never made.
            for (device, q), value in self.runner.loaded.items():
                original = self._program.params[q]
                is_kept = q not in self._home or (
                    q in self.runner.gradients and value is self._trained(q)
                )
                if is_kept and device != original.device:
                    original.copy_(value)
            self._write_state()

    def _write_state(self, here_only: bool = False) -> None:
        if self._known_state is not self.optimizer.state:
            return  # another was loaded
        for own in self._optimizers.values():
            for q, here in self._updated.items():
                original = self._program.params[q]
                if here in own.state and not (here_only and here.device != original.device):
                    self.optimizer.state[original] = self._moved(own.state[here], original)

    def _moved(self, state: Mapping[str, Any], param: Tensor) -> Mapping[str, Any]:
        """The optimizer's state of a parameter, beside it: itself, where it is there.

        Counters are in host memory, unless the optimizer computes with them on the device; other
        single numbers stay where they are.
        """
        groups = self.optimizer.param_groups
        on_device = any(group.get("fused") or group.get("capturable") for group in groups)
        tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
        stays = {k for k, v in tensors.items() if v.dim() < min(1, param.dim())} - {"step"}
        if param.device.type != "cpu" and not on_device:
            stays.add("step")
        moved = {
            k: v.to(param.device) if k in tensors and k not in stays else v
            for k, v in state.items()
        }
        return state if all(moved[k] is v for k, v in state.items()) else moved

    def close(self) -> None:
        """``sync``, and end the workers. Idempotent."""
        try:
            self._hide()
            self.sync()
        finally:
            self._optimizers = {}
            for hook in self._hooks:
                hook.remove()
            self.runner.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:
                raise  # else what has happened before is said, not what follows from it


def _write_state(trainer: weakref.ref[Trainer]) -> None:
    """Bring the state up to date that is about to be saved."""
    if (mine := trainer()) is not None:
        mine._write_state()


def _check_step(trainer: weakref.ref[Trainer], *_: Any) -> None:
    """Raises: RunnerError, the optimizer makes a step in which gradients have no part."""
    if (mine := trainer()) is not None and mine._num_added:
        raise RunnerError(
            f"a Trainer has the gradients of {mine._num_added} micro-batches, which "
            "optimizer.step() would not see: call trainer.update(), or trainer.zero_gradients() "
            "to forget them"
        )


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Which parameters each group has."""
    return [[id(x) for x in group["params"]] for group in optimizer.param_groups]


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Wait for the GPUs that hold them: devices have streams that do not wait for this one."""
    for device in {x.device for x in tensors if x.is_cuda}:
        torch.cuda.synchronize(device)


def _update(
    optimizer: torch.optim.Optimizer | None, gradients: list[Tensor], count: int
) -> Callable[[], None]:
    """What a device does at the end of a step: mean, update, and gradients back to zero."""

    def update() -> None:
        with torch.inference_mode(False), torch.no_grad():
            if count > 1:
                torch._foreach_div_(gradients, count)
            if optimizer is not None:
                optimizer.step()
            torch._foreach_zero_(gradients)

    return update
