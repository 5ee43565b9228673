"""``placement run``: carry a plan out on this machine and hold it against its prediction."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from placement import cli
from placement.cli import train
from placement.cli.ways import Differs, Work, carry_out, inference, model_of
from placement.runs.ways import compiled_in_words, difference, first_difference

if TYPE_CHECKING:
    from placement.plan import Plan

EXAMPLE = """examples:
  placement run plan.json --against-single-device
  placement run plan.json --model my_package.my_module:my_function --trace trace.json
  placement run plan.json --compiled         the first time it compiles: seconds to minutes
  placement run plan.json --wandb my-project     online if you are logged in
  placement run plan.json --distributed --processes 2 --trace trace.json

Exit code 1: the results differ from those of the plain module, or a process failed.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = cli.adding(parser)
    add("plan plan.json")
    add("--model package.module:function", "the module, unless a shipped one")
    add("--against-single-device", "measure the best device alone too", bool)
    add("--batches K", "micro-batches of a run; default: the plan's", int)
    add("--trace FILE", "write the measured timeline")
    add("--out FILE", "write the plan with what was measured")
    add("--wandb PROJECT", "mirror what was measured to W&B")
    add("--compiled", "compile what a device runs at a stretch (inference)", bool)
    add("--distributed", "spread the devices over processes", bool)
    add("--processes N", "number of processes (one per device)", int)
    add("--weights FILE", "a safetensors file: each process reads its own part")
    add("--timeout S", "a process silent for so long has failed; default: 30", float, default=30.0)


def run(args: argparse.Namespace) -> int:
    from placement.plan import load_plan

    plan = load_plan(args.plan)
    batches = args.batches if args.batches is not None else plan.num_microbatches
    if not 1 <= batches <= cli.LIMITS.batches:
        raise cli.UsageError(f"--batches {batches}: must be from 1 to {cli.LIMITS.batches:,}")
    if plan.order is not None and batches != plan.num_microbatches:
        raise cli.UsageError(
            f"--batches {batches}: the plan's order is for {plan.num_microbatches} micro-batches"
        )
    if not 0 < args.timeout < float("inf"):
        raise cli.UsageError(f"--timeout {args.timeout:g}: must be positive seconds")
    cli.check_outputs(args.out, args.trace)
    for what, why in (
        (args.distributed, "--distributed"),
        (plan.graph.mode == "training", "a plan for training"),
        (plan.order is not None, "a plan with an order, which speaks of single operators"),
    ):
        if args.compiled and what:
            raise cli.UsageError(f"--compiled is not for {why}: leave it out")
    if args.distributed:
        from placement.cli import distributed

        return distributed.run(args, plan, batches)
    if args.weights or args.processes is not None:
        raise cli.UsageError("--weights and --processes are for --distributed: add it")
    with cli.says_if_busy(), cli.progress() as report:
        report("loading and capturing the model", None)
        try:
            if plan.graph.mode == "training":
                work = train.here(args, plan, batches)
            else:
                work = _here(args, plan, batches)
            if args.compiled:
                work = _compiled(work, report)
                plan = plan.model_copy(update={"compiled": True})
            return carry_out(args, plan, batches, work, report)
        except Differs as error:
            cli.say(str(error))
            return cli.NO


def _compiled(work: Work, report: cli.Progress) -> Work:
    """The same, its runs of operators compiled before anything else; what that came to is said."""

    def make(**options: Any) -> Any:
        runner = work.make(**options)
        try:
            runner.compile(report)
        except BaseException:
            runner.close()
            raise
        cli.say(compiled_in_words(runner))
        return runner

    return work._replace(make=make)


def _here(args: argparse.Namespace, plan: Plan, batches: int) -> Work:
    """Inference on this machine."""
    module, inputs = cli.load_workload(model_of(plan, args.model))
    work = inference(plan, partial(plan.bind, module, inputs), module, inputs, batches)

    def compare(runner: Any) -> str:
        wrong = difference(runner, module, inputs)
        return wrong and wrong + first_difference(runner, inputs)

    return work._replace(difference=compare)
