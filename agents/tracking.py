"""Experiment trackers: mirrors of the run folder, whose files are the truth.

A tracker that cannot start, or a run that nobody syncs, loses nothing.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from placement.compare import Comparison, Row

if TYPE_CHECKING:
    import wandb

ArtifactKind = Literal["plan", "policy", "profile"]


class Mirror:
    """One run of a tracker; this one keeps nothing."""

    def log(self, figures: Mapping[str, float], step: int | None = None) -> None:
        """Figures at one moment of the run."""

    def comparison(self, comparison: Comparison) -> None:
        """All rows as one table; the value of every planner as a summary."""

    def image(self, name: str, path: Path) -> None:
        """A picture."""

    def artifact(
        self, name: str, kind: ArtifactKind, path: Path, aliases: Sequence[str] = ()
    ) -> None:
        """A file with a name that other runs find it by."""


@dataclass(frozen=True)
class Tracker:
    """``tracker=none``: the run folder is all there is."""

    @contextmanager
    def run(
        self, folder: Path, config: Mapping[str, Any], job_type: str, group: str | None = None
    ) -> Iterator[Mirror]:
        """The run of ``folder``; it ends with the ``with`` block, whatever happens inside.

        Args:
            job_type: ``compare`` or ``train``.
            group: what the runs of one sweep have in common.
        """
        yield Mirror()


@dataclass(frozen=True)
class WandbTracker(Tracker):
    """Weights & Biases, offline unless ``mode`` or the variable ``WANDB_MODE`` says otherwise.

    Offline runs lie in ``<folder>/wandb``; ``wandb sync`` sends them.
    """

    project: str = "device-placement"
    entity: str | None = None
    mode: str | None = None

    @contextmanager
    def run(
        self, folder: Path, config: Mapping[str, Any], job_type: str, group: str | None = None
    ) -> Iterator[Mirror]:
        """See ``Tracker.run``; without W&B (not logged in, no network) there is a warning."""
        import wandb

        # W&B takes a package called agents for an LLM library, and would recommend another product.
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        mode: Any = self.mode or os.environ.get("WANDB_MODE") or "offline"
        try:
            run = wandb.init(
                project=self.project,
                entity=self.entity,
                mode=mode,
                dir=folder,
                name=folder.name if group is None else f"{group}/{folder.name}",
                group=group,
                job_type=job_type,
                config=dict(config),
                reinit="finish_previous",
                settings=wandb.Settings(silent=True, console="off", save_code=False),
            )
        except (wandb.Error, OSError) as error:
            warnings.warn(f"not mirrored to W&B: {error}; or use tracker=none", stacklevel=2)
            yield Mirror()
            return
        failed = True
        try:
            yield _WandbMirror(run)
            failed = False
        finally:
            run.finish(exit_code=int(failed))


class _WandbMirror(Mirror):
    def __init__(self, run: wandb.Run) -> None:
        self._run = run

    def log(self, figures: Mapping[str, float], step: int | None = None) -> None:
        self._run.log(dict(figures), step=step)

    def comparison(self, comparison: Comparison) -> None:
        import wandb

        columns: list[str | int] = [f.name for f in fields(Row)]
        data = [list(asdict(row).values()) for row in comparison.rows]
        self._run.log({"comparison": wandb.Table(columns=columns, data=data)})
        for row in comparison.rows:
            seed = "" if row.seed is None else f"/{row.seed}"
            self._run.summary[f"value_s/{row.workload}/{row.planner}{seed}"] = row.value_s

    def image(self, name: str, path: Path) -> None:
        import wandb

        self._run.log({name: wandb.Image(str(path))})

    def artifact(
        self, name: str, kind: ArtifactKind, path: Path, aliases: Sequence[str] = ()
    ) -> None:
        import wandb

        # W&B allows no other characters in names.
        artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "-", name), type=kind)
        artifact.add_file(str(path))
        self._run.log_artifact(artifact, aliases=["latest", *aliases])
