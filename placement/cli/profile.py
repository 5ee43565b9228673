"""``placement profile``: measure every operator on every device."""

from __future__ import annotations

import argparse
import shlex

from placement import cli
from placement.cli import profiled
from placement.tools.files import FileError, cache_folder, csv_text, write_atomic

EXAMPLE = """examples:
  placement profile resnet50
  placement profile my_package.my_module:my_function --out profile.npz
  placement profile bert_base --seconds 2               predict the rest from earlier profiles
  placement profile bert_base --features --out all.csv  measure nothing: work, bytes and slack
  placement profile --distributed 2                     links between processes on this machine
  torchrun --nproc-per-node 1 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
    -m placement profile resnet50 --distributed         on every host: its devices, and the links

With --distributed the links between processes are fitted too, and a cluster file is written: its
devices, and these links with the interfaces that hosts share.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = cli.adding(parser)
    add("workload", f"a model: {cli.A_MODEL}", nargs="?")
    cli.add_mode(parser)
    add("--cluster FILE", "devices (YAML); default: this machine")
    add("--out FILE", "where to save; default: the cache folder")
    add(
        "--features",
        "what every operator costs by its description, and what waits for it (--out: CSV)",
        bool,
    )
    add("--profile FILE", "with --features: seconds for slack and critical path")
    add("--repeats", "rounds (default %(default)s)", int, default=10)
    add(
        "--seconds S",
        "measure so long, first operators that are hard to predict; predict the others",
        float,
    )
    add(
        "--distributed N",
        "measure the links between N processes here, or between those of torchrun",
        int,
        nargs="?",
        const=0,
    )
    add(
        "--cluster-out FILE",
        "with --distributed: where to write devices and links (default: cluster.yaml)",
    )


def run(args: argparse.Namespace) -> int:
    if args.repeats < 1:
        raise cli.UsageError(f"--repeats {args.repeats}: must be at least 1")
    if args.workload is None and args.distributed is None:
        raise cli.UsageError("name a model, or measure links between processes: --distributed 2")
    if args.workload is not None:
        cli.check_is_model(args.workload)
    if args.profile is not None and not args.features:
        raise cli.UsageError(f"--profile {args.profile} is for --features")
    mode = cli.mode_of(args)
    if args.seconds is not None and not args.seconds > 0:
        raise cli.UsageError(f"--seconds {args.seconds}: must be positive")
    if args.seconds is not None and (mode == "training" or args.distributed is not None):
        raise cli.UsageError("--seconds is for a model's inference on the devices of one machine")
    if args.features:
        if args.workload is None or args.distributed is not None:
            raise cli.UsageError("--features is of a model: name it, without --distributed")
        return _features(args)
    _check_output(args.out)
    if args.distributed is not None:
        from placement.cli import ranks

        return ranks.run(args)
    from placement.costs.corpus import remember
    from placement.costs.measure import cached_path, measurable, measure
    from placement.costs.measure_within import measure_within

    with cli.says_if_busy(), cli.progress() as report, cli.says_when_compiling():
        cluster = measurable(cli.cluster_of(args.cluster))
        graph = cli.capture_workload(args.workload, report, mode, args.optimizer)
        if args.seconds is None:
            profile = measure(graph, cluster, repeats=args.repeats, progress=report)
        else:
            profile = measure_within(graph, cluster, args.seconds, progress=report)
    path = args.out or cached_path(graph, cluster)
    if args.seconds is not None and not args.out:
        path = path.with_suffix(".partly.npz")  # whole profiles are taken without asking
    try:
        profile.save(path)
    except (OSError, ValueError) as error:
        profiled.show(graph, cluster, profile, as_json=args.json)
        raise cli.UsageError(f"the profile above was not saved: {error}{_or(args.out)}") from error
    remember(graph, cluster, profile)
    profiled.show(graph, cluster, profile, as_json=args.json)
    if args.seconds is not None:
        assert profile.predicted is not None
        num_predicted = int(profile.predicted.any(axis=1).sum())
        cli.say(
            f"{graph.num_ops - num_predicted} operators are measured, {num_predicted} are predicted"
        )
    words = ["placement", "plan", args.workload]
    words += ["--mode", mode] if mode == "training" else []
    words += ["--optimizer", args.optimizer] if args.optimizer else []
    words += ["--cluster", args.cluster] if args.cluster else []
    words += ["--profile", str(path)] if args.out or args.seconds is not None else []
    cli.say(f"profile saved to {path}; next: {shlex.join(words)} --out plan.json")
    return cli.OK


def _features(args: argparse.Namespace) -> int:
    """What every operator costs by its description.

    Slack and the critical path are those of a device that is nothing special, or, with
    ``--profile``, of its first device.
    """
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
        figures = {name: profiled.number(float(x[n])) for name, x in columns.items()}
        rows.append(words | figures)
    if args.out:
        write_atomic(args.out, csv_text(rows[0], (row.values() for row in rows)))
        cli.say(f"{len(rows)} operators written to {args.out}")
    if args.json:
        source = "reference" if profile is None else profile.device_names[0]
        answer: dict[str, object] = {"workload": graph.name, "graph_fingerprint": graph.fingerprint}
        answer |= {"num_ops": graph.num_ops, "num_edges": len(graph.edges)}
        answer |= {"critical_path_s": profiled.number(where.path_s), "seconds_from": source}
        cli.print_json(answer | {"operators": rows})
        return cli.OK
    largest = sorted(range(graph.num_ops), key=lambda n: -seconds[n])[: cli.LIMITS.features]
    cells = [
        [
            graph.op_name[n],
            described.kind[n],
            f"{described.flops[n] / 1e6:.3g}",
            f"{(described.read_bytes[n] + described.written_bytes[n]) / 2**20:.3g}",
            f"{described.intensity[n]:.3g}",
            f"{described.fan_in[n]:.0f}/{described.fan_out[n]:.0f}",
            f"{described.level[n]:.0f}",
            "*" if where.critical[n] else profiled.seconds(where.slack_s[n]),
        ]
        for n in largest
    ]
    header = ["operator", "kind", "MFLOP", "MiB", "FLOP/B", "in/out", "level", "slack"]
    cli.print_table(f"{graph.name}: the largest of {graph.num_ops} operators", header, cells)
    print(f"* on the critical path, {where.critical.sum()} operators; all columns: --json, --out")
    return cli.OK


def _check_output(out: str | None) -> None:
    """Raises: UsageError, the profile could not be saved."""
    try:
        cli.check_outputs(out or str(cache_folder() / "profiles" / "profile.npz"))
    except FileError as error:
        raise cli.UsageError(f"{error}{_or(out)}") from error


def _or(out: str | None) -> str:
    return "" if out else "; or set PLACEMENT_HOME to another folder"
