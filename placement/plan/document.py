"""``Plan``: the whole file as a value, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from placement.cluster import Cluster
from placement.graph import OpGraph
from placement.plan import checking, comparing, showing
from placement.plan.content import Content
from placement.plan.parts import PlanError, PlanMismatch
from placement.problem import Placement, Problem
from placement.profile import error_in
from placement.tools.files import write_atomic

if TYPE_CHECKING:
    from placement.executor import Runner, Trainer
    from placement.timeline import Timeline


class Plan(Content):
    """One decision for one graph on one cluster.

    Attributes:
        assignment: operator name -> device name, in the order of operator numbers.
        phases: of a periodic plan, ``K - 1`` times what differs from ``assignment``: micro-batch
            ``m`` runs as phase ``m % K`` says, phase 0 being ``assignment`` itself. Empty: all
            micro-batches run alike. A file with phases has ``schema_version`` 2.
        cuda_graphs: runs of operators on a GPU are replayed as CUDA graphs, as they were when this
            plan was measured.
        compiled: runs of operators on a CPU are compiled, as they were when this plan was measured
            and, where ``provenance.profile`` says so, when its costs were.
        second_j: joules that a second was worth to the objective ``energy``.
        priority: ``[N]`` rank of each operator where several are ready (smallest first).
        order: for every device the (operator, micro-batch) in the order they run, or null: then
            the list rule of ``priority`` decides.
        pieces: which operators of the model are cut; the assignment is of their pieces. A file with
            pieces has ``schema_version`` 3.
        stages: the assignment as maximal runs of operators on one device.
        lower_bound_s: objective -> proved: no placement is better, periodic or not; of a plan
            without phases, none without.
        device_map: module path -> device name, for the outermost modules that live whole on
            one device.
    """

    graph_differences = comparing.graph_differences
    cluster_differences = comparing.cluster_differences
    missing_devices = comparing.missing_devices
    inconsistencies = checking.inconsistencies

    def _repr_html_(self) -> str:
        """What a notebook shows: values, devices and stages."""
        from placement.tools.shown import table

        return "".join(table(*one) for one in showing.tables(self))

    @property
    def doubt(self) -> str:
        """That one device may do as well, by what was predicted; empty where it ran or may not.

        It is predicted to, or to be worse by less than the profile's error (``Profile.error``).
        """
        alone, has_run = self.fallback, self.measured_s(self.objective) is not None
        if alone is None or self.devices_in_use == {alone.device} or has_run:
            return ""
        gain = 1 - self.predicted.value_s / alone.value_s if alone.value_s else 0.0
        error = error_in(self.provenance.profile)
        if gain > error:
            return ""
        one = f"{alone.device} alone"
        if gain <= 0:
            return f"{one} is predicted to do no worse: --planner best_of tries it too"
        return (
            f"predicted {gain:.1%} better than {one}, and the calibration error is {error:.1%}: "
            "placement run --against-single-device tells which is faster"
        )

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            FileError: it cannot be written there.
        """
        write_atomic(path, self.model_dump_json(indent=1) + "\n")

    def placement(
        self, graph: OpGraph, cluster: Cluster, *, other_shapes: bool = False
    ) -> Placement:
        """The assignment as int32 ``[N]`` of ``graph`` on ``cluster``; with phases ``[K, N]``.

        ``other_shapes``: as for ``bind``.

        Raises:
            PlanMismatch: made for another graph or other devices; names the parts that differ.
        """
        by_name = graph.op_name == (*self.assignment,)
        differs = [] if other_shapes and by_name else self.graph_differences(graph)
        differs += self.cluster_differences(cluster)
        if differs:
            raise PlanMismatch(
                f"the plan was made for {self.graph.name!r} ({self.graph.fingerprint[:12]}) on "
                f"{[d.name for d in self.cluster.devices]}: {'; '.join(differs)}. Plan "
                "for the model and devices at hand: "
                "placement plan MODEL --planner best_of --out plan.json"
                + ("; or, as it has these operators: bind(..., other_shapes=True)" * by_name)
            )
        rows = [[cluster.index(phase[op]) for op in graph.op_name] for phase in self.assignments]
        placed = np.array(rows if self.phases else rows[0], np.int32)
        if not other_shapes:
            return placed
        # Another operator may be a view then: it goes where its memory is.
        return placed[..., graph.group_op[graph.group_ptr[graph.group]]]

    def bind(
        self,
        module: Any,
        example_inputs: Any = None,
        *,
        other_shapes: bool = False,
        outputs: str = "host",
        in_order: bool = False,
        record: bool = False,
        compiled: bool | None = None,
    ) -> Runner:
        """``module`` on the devices of the plan: call the runner, or stream through it.

        The module is captured with ``example_inputs``, or with inputs of the shapes and dtypes
        of the plan. ``other_shapes``: those of ``example_inputs`` may be others, if the operators
        have the same names; what the plan predicts is not about them. ``outputs`` and ``record``
        are those of ``Runner``. ``in_order``: the runner follows the order of the plan, if it has
        one, and takes exactly its micro-batches at a time; otherwise it uses the list rule, and
        takes any number. ``compiled``: the first call compiles runs of operators (see
        ``Runner.compile``); None: as the plan says.

        Raises:
            PlanMismatch: another module than the plan's, or this machine lacks a device.
            CaptureError: the module cannot be captured.
        """
        from placement.executor import Runner
        from placement.program import inputs_from_spec

        if self.graph.mode == "training":
            raise PlanMismatch(
                "the plan is for training: bind_training(module, optimizer, loss=...)"
            )
        graph = self._captured(module, example_inputs, inputs_from_spec)
        cluster = self.cluster.build()
        placement = self.placement(graph, cluster, other_shapes=other_shapes)
        options = self.run_options(graph, in_order=in_order)
        runner = Runner(graph, cluster, placement, record=record, outputs=outputs, **options)
        runner.cuda_graphs = self.cuda_graphs
        runner.compiled = self.compiled if compiled is None else compiled
        return runner

    def bind_training(
        self,
        module: Any,
        optimizer: Any,
        example_inputs: Any = None,
        *,
        loss: Callable[..., Any] | None = None,
        colocate_backward: bool = True,
        split_backward: bool = False,
        recompute: Sequence[str] = (),
        record: bool = False,
    ) -> Trainer:
        """``module`` on the devices of the plan, to be trained by ``optimizer``.

        ``loss``, how backward is cut and what is recomputed as for ``placement.capture``;
        otherwise as ``bind``. An order of the plan is followed: steps then take exactly its
        micro-batches.

        Raises:
            PlanMismatch: another module, loss or optimizer than the plan's, or this machine lacks
                a device.
            CaptureError: the module cannot be captured.
        """
        from placement.capturing.training import example_from_spec
        from placement.executor import Trainer
        from placement.program import inputs_from_spec

        if self.graph.mode != "training":
            raise PlanMismatch(
                "the plan is for inference: bind(module), or plan again from "
                "capture(module, inputs, mode='training')"
            )
        graph = self._captured(
            module,
            example_inputs,
            inputs_from_spec if loss is None else example_from_spec,
            mode="training",
            loss=loss,
            optimizer=optimizer,
            colocate_backward=colocate_backward,
            split_backward=split_backward,
            recompute=recompute,
        )
        cluster = self.cluster.build()
        return Trainer(
            graph,
            cluster,
            self.placement(graph, cluster),
            optimizer,
            record=record,
            **self.run_options(graph, in_order=True),
        )

    def _captured(
        self, module: Any, example: Any, from_spec: Callable[[Any], Any], **options: Any
    ) -> OpGraph:
        """The graph of ``module`` for ``example`` or the plan's inputs, on a machine that fits."""
        from placement.capturing import capture
        from placement.program import CaptureError

        missing = self.missing_devices()
        if missing:
            raise PlanMismatch(
                f"this machine cannot run the plan: {'; '.join(missing)}. Plan for this machine: "
                f"placement plan {self.graph.workload or 'MODEL'} --planner best_of --out plan.json"
            )
        if example is None and self.graph.input_spec is None:
            raise PlanError("the plan has no input shapes: give bind(module, example_inputs)")
        if example is not None:
            return self.cut(capture(module, example, **options))
        try:
            return self.cut(capture(module, from_spec(self.graph.input_spec), **options))
        except CaptureError as error:
            raise CaptureError(
                f"{error} (the plan's inputs are given: it is of {self.graph.name!r})"
            ) from error

    def cut(self, graph: OpGraph) -> OpGraph:
        """``graph``, of the module as it is, in the pieces of the plan.

        Raises:
            PlanMismatch: it cannot be cut so.
        """
        if self.pieces is None:
            return graph
        from placement.pieces import Pieces, PiecesError, Rule, Window, split

        cuts, rules = self.pieces.operators, {}
        for op, c in cuts.items():
            inputs = tuple(Window(*x) if isinstance(x, tuple) else x for x in c.inputs)
            rules[op] = Rule(inputs, c.numbers, c.outputs, c.zeros)
        bounds = {op: c.bounds for op, c in cuts.items()}
        try:
            return split(graph, Pieces(self.pieces.shares, rules, bounds))
        except PiecesError as error:
            raise PlanMismatch(f"pieces: {error}") from error

    def run_options(self, graph: OpGraph, *, in_order: bool) -> dict[str, Any]:
        """Arguments of ``Runner`` and ``Trainer``; ``in_order`` as for ``bind``."""
        schedule = self.schedule(graph) if in_order else None
        # An order needs room for all of its micro-batches.
        window = self.max_in_flight if schedule is None else self.num_microbatches
        return {"max_in_flight": window, "priority": self.priority, "schedule": schedule}

    def timeline(self, problem: Problem, num_microbatches: int | None = None) -> Timeline:
        """What the simulator predicts for so many micro-batches; None: as many as planned.

        As many of them in flight as planned, and as many as planned in the order of the plan.

        Raises:
            PlanMismatch: ``problem`` is about another graph or other devices.
            ProblemError: it cannot be placed so.
        """
        from placement.simulator import simulate

        placement = self.placement(problem.graph, problem.cluster)
        problem = replace(
            problem, num_microbatches=self.num_microbatches, max_in_flight=self.max_in_flight
        )
        if num_microbatches not in (None, self.num_microbatches):
            return simulate(problem, placement, num_microbatches=num_microbatches)
        return simulate(problem, placement, self.schedule(problem.graph))
