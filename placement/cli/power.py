"""``placement doctor --power``: watts of this machine's devices, measured where it has meters."""

from __future__ import annotations

import argparse
import shlex

from placement import cli

SECONDS = 2.0  # per device


def run(args: argparse.Namespace) -> int:
    from placement.costs.power import measured

    cli.check_outputs(args.out)
    cluster = cli.cluster_of(args.cluster)
    with cli.progress() as report:
        report("nothing runs, then each device works", None)
        cluster = measured(cluster, seconds=SECONDS if args.seconds is None else args.seconds)
    if args.out is not None:
        cluster.to_yaml(args.out)
    if args.json:
        names = ("name", "busy_w", "idle_w", "power_source")
        devices = [{name: getattr(d, name) for name in names} for d in cluster.devices]
        cli.print_json({"power_source": cluster.power_source, "devices": devices})
        return cli.OK
    rows = [
        [d.name, *(_watts(w) for w in (d.busy_w, d.idle_w)), d.power_source if d.busy_w else "-"]
        for d in cluster.devices
    ]
    cli.print_table(cluster.name, ["device", "busy W", "idle W", "source"], rows)
    if args.out is not None:
        out = shlex.quote(args.out)
        cli.say(f"devices written to {args.out}; next: placement plan ... --cluster {out}")
    return cli.OK


def _watts(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
