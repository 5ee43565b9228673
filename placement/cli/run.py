"""``placement run``: carry a plan out on this machine and hold it against its prediction."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from placement import cli
from placement.cli.ways import answered, differs, model_of, recorded_trace
from placement.runs.ways import alone, calls, difference, first_difference, measure

EXAMPLE = """examples:
  placement run plan.json --against-single-device
  placement run plan.json --model my_package.my_module:my_function --trace trace.json
  placement run plan.json --wandb my-project     online if you are logged in
  placement run plan.json --distributed --processes 2 --trace trace.json

Exit code 1: the results differ from those of the plain module, or a process failed.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="plan.json")
    parser.add_argument(
        "--model", metavar="package.module:function", help="the module, unless a shipped one"
    )
    parser.add_argument(
        "--against-single-device", action="store_true", help="measure the best device alone too"
    )
    parser.add_argument(
        "--batches", type=int, metavar="K", help="micro-batches of a run; default: the plan's"
    )
    parser.add_argument("--trace", metavar="FILE", help="write the measured timeline")
    parser.add_argument("--out", metavar="FILE", help="write the plan with what was measured")
    parser.add_argument("--wandb", metavar="PROJECT", help="mirror what was measured to W&B")
    parser.add_argument(
        "--distributed", action="store_true", help="spread the devices over processes"
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="number of processes (one per device)"
    )
    parser.add_argument(
        "--weights", metavar="FILE", help="a safetensors file: each process reads its own part"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="a process silent for so long has failed; default: 30",
    )


def run(args: argparse.Namespace) -> int:
    from placement.plan import load_plan

    plan = load_plan(args.plan)
    batches = args.batches if args.batches is not None else plan.num_microbatches
    if not 1 <= batches <= cli.MAX_BATCHES:
        raise cli.UsageError(f"--batches {batches}: must be from 1 to {cli.MAX_BATCHES:,}")
    if plan.order is not None and batches != plan.num_microbatches:
        raise cli.UsageError(
            f"--batches {batches}: the plan's order is for {plan.num_microbatches} micro-batches"
        )
    if not 0 < args.timeout < float("inf"):
        raise cli.UsageError(f"--timeout {args.timeout:g}: must be positive seconds")
    cli.check_outputs(args.out, args.trace)
    if args.distributed:
        from placement.cli import distributed

        return distributed.run(args, plan, batches)
    if args.weights or args.processes is not None:
        raise cli.UsageError("--weights and --processes are for --distributed: add it")
    if plan.graph.mode == "training":
        from placement.cli import train

        return train.run(args, plan, batches)
    with cli.says_if_busy(), cli.progress() as report:
        report("loading the model", None)
        module, inputs = cli.load_workload(model_of(plan, args.model))
        report("capturing the model", None)
        with plan.bind(module, inputs) as runner:
            compared = not runner.graph.program.is_random
            wrong = difference(runner, module, inputs) if compared else ""
            if wrong:
                wrong += first_difference(runner, inputs)
                cli.say(differs(args, "the plain module", wrong))
                return cli.NO
            single = plan.fallback.device if plan.fallback else None
            with ExitStack() as others:
                many = runner  # one call at a time has no order to follow
                if plan.order is not None:
                    many = others.enter_context(plan.bind(module, inputs, in_order=True))
                ways = {"plan": calls(runner, many, inputs, batches)}
                if args.against_single_device and single:
                    other = others.enter_context(alone(plan, runner, single))
                    ways["single"] = calls(other, other, inputs, batches)
                measured = measure(ways, report)
        trace = None
        if args.trace:
            report("recording a trace", None)
            trace = recorded_trace(plan, module, inputs, batches)
    return answered(args, plan, measured, trace, compared=compared)
