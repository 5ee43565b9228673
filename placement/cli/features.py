"""``placement profile --features``: what every operator costs by its description."""

from __future__ import annotations

import argparse

from placement import cli
from placement.tools.files import csv_text, write_atomic

NUM_SHOWN = 15


def run(args: argparse.Namespace) -> int:
    """Slack and the critical path are those of a device that is nothing special, or, with
    ``--profile``, of its first device."""
    from placement.costs.features import CLASSES, features, slack
    from placement.profile import Profile

    cli.check_outputs(args.out)
    profile = None if args.profile is None else Profile.load(args.profile)
    with cli.progress() as report:
        graph = cli.capture_workload(args.workload, report, cli.mode_of(args), args.optimizer)
    described = features(graph)
    if profile is None:
        from placement.costs.table import reference_s

        seconds = reference_s(described)
    else:
        profile.check(graph)
        seconds = profile.compute_s[:, 0]
    where = slack(graph, seconds)
    columns = described.columns | {"seconds": seconds, "start_s": where.start_s}
    columns |= {"slack_s": where.slack_s, "critical": where.critical.astype(float)}
    del columns["op_class"]
    rows = []
    for n in range(graph.num_ops):
        words = {"operator": graph.op_name[n], "kind": graph.op_kind[n]}
        words |= {"class": CLASSES[described.op_class[n]], "module": graph.op_module[n]}
        rows.append(words | {name: float(values[n]) for name, values in columns.items()})
    if args.out:
        write_atomic(args.out, csv_text(rows[0], (row.values() for row in rows)))
        cli.say(f"{len(rows)} operators written to {args.out}")
    if args.json:
        source = "reference" if profile is None else profile.device_names[0]
        answer: dict[str, object] = {"workload": graph.name, "graph_fingerprint": graph.fingerprint}
        answer |= {"num_ops": graph.num_ops, "num_edges": len(graph.edges)}
        answer |= {"critical_path_s": where.path_s, "seconds_from": source}
        cli.print_json(answer | {"operators": rows})
        return cli.OK
    largest = sorted(range(graph.num_ops), key=lambda n: -seconds[n])[:NUM_SHOWN]
    cells = [
        [
            graph.op_name[n],
            described.kind[n],
            f"{described.flops[n] / 1e6:.3g}",
            f"{(described.read_bytes[n] + described.written_bytes[n]) / 2**20:.3g}",
            f"{described.intensity[n]:.3g}",
            f"{described.fan_in[n]:.0f}/{described.fan_out[n]:.0f}",
            f"{described.level[n]:.0f}",
            "*" if where.critical[n] else cli.seconds(where.slack_s[n]),
        ]
        for n in largest
    ]
    header = ["operator", "kind", "MFLOP", "MiB", "FLOP/B", "in/out", "level", "slack"]
    cli.print_table(f"{graph.name}: the largest of {graph.num_ops} operators", header, cells)
    print(f"* on the critical path, {where.critical.sum()} operators; all columns: --json, --out")
    return cli.OK
