"""``placement import``: any problem as one file of our own format."""

from __future__ import annotations

import argparse
import shlex

from placement import cli
from placement.cli import serving
from placement.cli.plan import configure_problem, load_problem

EXAMPLE = """examples:
  placement import bert_l-3_inference.json --out problem.json
  placement import graph.txt --devices 8 --bandwidth 12e9 --mode inference --out problem.json
  placement import model.onnx --dim batch=1 --cluster cluster.yaml --out problem.json
  placement import resnet50 --out problem.json     measured here; without the module itself

Every command that takes a problem takes problem.json: placement plan problem.json --planner heft
"""


def configure(parser: argparse.ArgumentParser) -> None:
    configure_problem(parser)
    parser.add_argument("--out", metavar="FILE", required=True, help="write the problem")


def run(args: argparse.Namespace) -> int:
    from placement import importers
    from placement.bounds import lower_bounds

    cli.check_outputs(args.out)
    with cli.progress() as report:
        problem = load_problem(args, report, serving.of(args))
    importers.save(problem, args.out)
    graph = problem.graph
    if args.json:
        answer: dict[str, object] = {"nodes": graph.num_ops, "edges": len(graph.edges)}
        answer |= {"devices": list(problem.cluster.device_names), "objective": problem.objective}
        bounds = lower_bounds(problem)
        cli.print_json(answer | {"fingerprint": graph.fingerprint, "lower_bound_s": bounds})
    else:
        sizes = (graph.num_ops, len(graph.edges), problem.num_devices, graph.num_groups)
        row = [*map(str, sizes), cli.byte_size(float(graph.param_bytes.sum()))]
        columns = ["operators", "edges", "devices", "colocation groups", "parameters"]
        cli.print_table(f"{graph.name}, for {problem.objective}", columns, [row])
    out = shlex.quote(args.out)
    cli.say(f"problem written to {args.out}; next: placement plan {out} --planner best_of")
    return cli.OK
