"""Run placements for real: one worker per device, in a pipeline, measured like predicted."""

from placement.executor.executor import Executor
from placement.executor.runner import Runner, RunnerError
from placement.executor.trainer import Trainer

__all__ = ["Executor", "Runner", "RunnerError", "Trainer"]
