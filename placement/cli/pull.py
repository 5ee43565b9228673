"""``placement pull``: a plan or a policy from W&B, by its name; nothing fetched is executed."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement import cli

if TYPE_CHECKING:
    import wandb

EXAMPLE = """examples:
  placement pull my-team/device-placement/plan-resnet50:best
  placement pull my-team/device-placement/policy:latest --out policy.safetensors

W&B must be reachable, and you logged in: wandb login. A plan is checked against the schema of
plans, a policy for being one file of weights without code; what is wrong is not kept. Keys of
--json: path, kind, name, version, num_bytes.
"""
_NAME = re.compile(r"[\w.-]+/[\w.-]+/[\w.-]+:[\w.-]+")
_SUFFIX = {"plan": ".json", "policy": ".safetensors"}
_MAX_BYTES = 256 * 2**20
_MAX_HEADER_BYTES = 2**24


class PullError(ValueError):
    """An artifact that cannot be fetched, or is not what it says; the message says why."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="ENTITY/PROJECT/NAME:ALIAS")
    parser.add_argument("--out", metavar="FILE", help="default: NAME.json or NAME.safetensors here")


def run(args: argparse.Namespace) -> int:
    from placement.tools.files import write_atomic

    if not _NAME.fullmatch(args.name):
        raise cli.UsageError(
            f"{args.name}: not the name of an artifact; e.g. my-team/my-project/plan-resnet50:best"
        )
    cli.check_outputs(args.out)
    name = args.name.rsplit("/", 1)[1].rsplit(":", 1)[0]
    with cli.progress() as report, tempfile.TemporaryDirectory() as folder:
        report(f"asking for {args.name}", None)
        artifact = _artifact(args.name)
        suffix = _SUFFIX.get(artifact.type)
        if suffix is None:
            raise PullError(f"{args.name} is a {artifact.type}; pull fetches plans and policies")
        path = Path(args.out or name.lstrip(".") + suffix)
        if args.out is None and path.exists():
            raise cli.UsageError(f"{path} exists; name the file to write: --out FILE")
        cli.check_outputs(str(path))
        report(f"fetching {args.name}", None)
        data = _fetch(artifact, Path(folder), suffix)
        check = _check_plan if artifact.type == "plan" else _check_policy
        check(data, args.name, Path(folder))
    write_atomic(path, data)
    if args.json:
        facts = {"path": str(path), "kind": artifact.type, "name": args.name}
        cli.print_json(facts | {"version": artifact.version, "num_bytes": len(data)})
    else:
        print(f"{path}: {artifact.type} {args.name} ({artifact.version}), {len(data)} bytes")
    return cli.OK


def _artifact(name: str) -> wandb.Artifact:
    import wandb

    try:
        return wandb.Api().artifact(name)
    except (wandb.Error, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PullError(
            f"{name}: {reason}; are you logged in (wandb login), is it there?"
        ) from error


def _fetch(artifact: wandb.Artifact, folder: Path, suffix: str) -> bytes:
    """The content of the artifact's only file of this kind.

    The name that the server gives decides nothing here: it must be plain, and the file is taken
    from a folder made for it. References (links to anywhere) are refused.
    """
    import wandb

    entries = artifact.manifest.entries
    names = [n for n in entries if n.endswith(suffix)]
    if len(names) != 1:
        raise PullError(f"{artifact.name}: {len(names)} files {suffix} instead of one")
    entry = entries[names[0]]
    if Path(names[0]).name != names[0] or "\\" in names[0]:
        raise PullError(f"{artifact.name}: its file is called {names[0]!r}, which is no plain name")
    if entry.ref is not None:
        raise PullError(f"{artifact.name}: {names[0]} is a link to {entry.ref}, not a file")
    if entry.size is None or not 0 < entry.size <= _MAX_BYTES:
        raise PullError(f"{artifact.name}: {entry.size} bytes, expected 1 to {_MAX_BYTES}")
    try:
        path = Path(entry.download(root=str(folder)))
    except (wandb.Error, OSError, ValueError) as error:
        raise PullError(f"{artifact.name}: cannot be fetched: {error}") from error
    if path.is_symlink() or path.resolve().parent != folder.resolve():
        raise PullError(f"{artifact.name}: it was to be written to {path}")
    data = path.read_bytes()
    if len(data) != entry.size:
        raise PullError(f"{artifact.name}: {len(data)} bytes instead of {entry.size}")
    return data


def _check_plan(data: bytes, name: str, folder: Path) -> None:
    from placement.plan import PlanError, load_plan

    path = folder / "checked.json"
    path.write_bytes(data)
    try:
        load_plan(path)
    except PlanError as error:
        raise PullError(str(error).replace(str(path), name)) from error


def _check_policy(data: bytes, name: str, folder: Path) -> None:
    """A safetensors file: a length, that much JSON, and numbers. Whether it fits is for who loads.

    agents.trained.TrainedPolicy.load checks the rest, and executes nothing either.
    """
    size = int.from_bytes(data[:8], "little")
    try:
        head: Any = json.loads(data[8 : 8 + size]) if size <= _MAX_HEADER_BYTES else None
        formulation = json.loads(head["__metadata__"]["policy"])["formulation"]
        ends = [v["data_offsets"][1] for k, v in head.items() if k != "__metadata__"]
        is_whole = 8 + size + max(ends, default=0) == len(data)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PullError(f"{name}: not a policy: {error!r}") from error
    if not is_whole or not isinstance(formulation, str):
        raise PullError(f"{name}: not a policy: truncated, or too long")
