"""Experiment trackers: mirrors of the run folder, whose files are the truth.

A tracker that cannot start, or a run that nobody syncs, loses nothing.
"""

from __future__ import annotations

import csv
import os
import re
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from placement.report.row import Row
from placement.report.table import Comparison
from placement.tools.files import write_atomic

if TYPE_CHECKING:
    import wandb

ArtifactKind = Literal["plan", "policy", "profile", "report"]
NUM_POINTS = 50  # of a best-so-far curve
SECONDS = "best_so_far/plan_s"  # the axis of these curves


class Mirror:
    """One run of a tracker; this one keeps nothing."""

    def log(self, figures: Mapping[str, float], step: int | None = None) -> None:
        """Figures at one moment of the run."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Rows of which the first column says what each is of."""

    def comparison(self, comparison: Comparison) -> None:
        """All rows as one table, values as a summary, and best-so-far curves of the planners."""

    def image(self, name: str, path: Path) -> None:
        """A picture."""

    def artifact(
        self, name: str, kind: ArtifactKind, *paths: Path, aliases: Sequence[str] = ()
    ) -> None:
        """Files with a name that other runs find them by."""


@dataclass(frozen=True)
class Tracker:
    """``tracker=none``: the run folder is all there is."""

    @contextmanager
    def run(
        self, folder: Path, config: Mapping[str, Any], job_type: str, group: str | None = None
    ) -> Iterator[Mirror]:
        """The run of ``folder``; it ends with the ``with`` block, whatever happens inside.

        Args:
            job_type: ``compare``, ``train`` or ``run``.
            group: what the runs of one sweep have in common.
        """
        yield Mirror()


@dataclass(frozen=True)
class LocalTracker(Tracker):
    """Files of the run folder: ``tracked.csv`` (name, step, value), and TensorBoard's events.

    ``tensorboard --logdir FOLDER`` shows them; without the package
    (``pip install 'device-placement-rl[tensorboard]'``) there is only the CSV file.
    """

    @contextmanager
    def run(
        self, folder: Path, config: Mapping[str, Any], job_type: str, group: str | None = None
    ) -> Iterator[Mirror]:
        """See ``Tracker.run``; a run that goes on appends."""
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            events = None
        else:
            events = SummaryWriter(str(folder / "tensorboard"))
        with (folder / "tracked.csv").open("a", encoding="utf-8", buffering=1) as file:
            try:
                yield _LocalMirror(csv.writer(file, lineterminator="\n"), file.tell() == 0, events)
            finally:
                if events is not None:
                    events.close()


class _LocalMirror(Mirror):
    def __init__(self, table: Any, is_new: bool, events: Any) -> None:
        self._table, self._events = table, events
        if is_new:
            table.writerow(("name", "step", "value"))

    def log(self, figures: Mapping[str, float], step: int | None = None) -> None:
        for name, value in figures.items():
            self._table.writerow((name, "" if step is None else step, value))
            if self._events is not None:
                self._events.add_scalar(name, value, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        for row in rows:
            figures = zip(columns[1:], row[1:], strict=True)
            self.log({f"{name}/{row[0]}/{column}": value for column, value in figures})

    def comparison(self, comparison: Comparison) -> None:
        for name, value_s in _values(comparison).items():
            self.log({name: value_s})
        for plan_s, figures in _curves(comparison):
            self.log(figures, round(1e6 * plan_s))  # TensorBoard counts in whole steps: µs

    def image(self, name: str, path: Path) -> None:
        if self._events is not None:
            from PIL import Image  # what drew the picture brought it

            pixels = np.asarray(Image.open(path).convert("RGB"))
            self._events.add_image(name, pixels, dataformats="HWC")


_NOT_MIRRORED = "not mirrored to W&B: {}; or use tracker=none"


@dataclass(frozen=True)
class WandbTracker(Tracker):
    """Weights & Biases: online if the user is logged in, else offline.

    ``mode``, or the variable ``WANDB_MODE``, decides otherwise. Offline runs lie in
    ``<folder>/wandb``; ``wandb sync`` sends them. A run that is resumed in its folder stays the
    same run: ``<folder>/wandb_run_id`` has its id.

    Attributes:
        project, entity: where it belongs.
        mode: ``online``, ``offline`` or ``disabled``.
        group, tags, notes: as W&B has them; a sweep's jobs are a group anyway.
        name: of a run that is another one each time; None: the folder's, which goes on.
    """

    project: str = "device-placement"
    entity: str | None = None
    mode: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    notes: str | None = None
    name: str | None = None

    @contextmanager
    def run(
        self, folder: Path, config: Mapping[str, Any], job_type: str, group: str | None = None
    ) -> Iterator[Mirror]:
        """See ``Tracker.run``; without network it is offline, without W&B there is a warning."""
        try:
            import wandb
        except ImportError as error:  # not there, or not with the other packages that are
            warnings.warn(_NOT_MIRRORED.format(error), stacklevel=2)
            yield Mirror()
            return
        # W&B takes a package called agents for an LLM library, and would recommend another product.
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        mode = self.mode or os.environ.get("WANDB_MODE")
        options: dict[str, Any] = {
            "project": self.project,
            "entity": self.entity,
            "dir": folder,
            "name": self.name or (folder.name if group is None else f"{group}/{folder.name}"),
            "group": self.group or group,
            "tags": list(self.tags),
            "notes": self.notes,
            "id": None if self.name else _run_id(folder / "wandb_run_id"),
            "resume": "allow",
            "job_type": job_type,
            "config": dict(config),
            "reinit": "finish_previous",
            "settings": wandb.Settings(
                silent=True, console="off", save_code=False, init_timeout=30.0
            ),
        }
        try:
            run = _begin(mode or ("online" if is_logged_in() else "offline"), options)
        except (wandb.Error, OSError) as error:
            warnings.warn(_NOT_MIRRORED.format(error), stacklevel=2)
            yield Mirror()
            return
        failed = True
        try:
            yield _WandbMirror(wandb, run)
            failed = False
        finally:
            run.finish(exit_code=int(failed))


def _run_id(path: Path) -> str:
    """The id of the run of a folder: the same however often it goes on."""
    if not path.is_file():
        write_atomic(path, uuid.uuid4().hex[:12])
    return path.read_text(encoding="utf-8").strip()


def is_logged_in() -> bool:
    """Whether W&B has credentials for this user; asks nobody and sends nothing."""
    import wandb

    return wandb.login(prompt=False, verify=False)


def _begin(mode: Any, options: dict[str, Any]) -> wandb.Run:
    """A run of this mode, or offline where the server cannot be reached."""
    import wandb

    try:
        return wandb.init(mode=mode, **options)
    except (wandb.errors.CommError, TimeoutError) as error:
        if mode != "online":
            raise
        warnings.warn(f"W&B is offline: {error}; send it later: wandb sync", stacklevel=4)
        return wandb.init(mode="offline", **options)


class _WandbMirror(Mirror):
    def __init__(self, package: Any, run: wandb.Run) -> None:
        self._wandb, self._run = package, run

    def log(self, figures: Mapping[str, float], step: int | None = None) -> None:
        self._run.log(dict(figures), step=step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        data = [list(row) for row in rows]
        self._run.log({name: self._wandb.Table(columns=list(columns), data=data)})

    def comparison(self, comparison: Comparison) -> None:
        rows = [list(asdict(row).values()) for row in comparison.rows]
        self.table("comparison", [f.name for f in fields(Row)], rows)
        self._run.summary.update(_values(comparison))
        self._run.define_metric(SECONDS)
        self._run.define_metric("best_so_far/*", step_metric=SECONDS)
        for plan_s, figures in _curves(comparison):
            self._run.log({SECONDS: plan_s, **figures})

    def image(self, name: str, path: Path) -> None:
        self._run.log({name: self._wandb.Image(str(path))})

    def artifact(
        self, name: str, kind: ArtifactKind, *paths: Path, aliases: Sequence[str] = ()
    ) -> None:
        # W&B allows no other characters in names.
        artifact = self._wandb.Artifact(re.sub(r"[^\w.-]+", "-", name), type=kind)
        for path in paths:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact, aliases=["latest", *aliases])


def _values(comparison: Comparison) -> dict[str, float]:
    """The objective in seconds of every row, by what it is of."""
    return {
        f"value_s/{r.workload}/{r.planner}" + ("" if r.seed is None else f"/{r.seed}"): r.value_s
        for r in comparison.rows
    }


def _curves(comparison: Comparison) -> Iterator[tuple[float, dict[str, float]]]:
    """After so many seconds of planning: what every planner has found over the best of all."""
    from placement.report.curves import best_so_far

    longest_s = max((r.plan_s for r in comparison.rows), default=0.0)
    at_s = np.geomspace(1e-3, max(longest_s, 1e-2), NUM_POINTS)
    curves = best_so_far(comparison, at_s)
    for i, plan_s in enumerate(at_s):
        yield float(plan_s), {f"best_so_far/{name}": float(v[i]) for name, v in curves.items()}
