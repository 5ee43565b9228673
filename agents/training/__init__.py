"""Train policies: ``train(problems, config=TrainConfig(...))``, and the parts of it."""

from agents.training.config import TrainConfig
from agents.training.trainer import make_agent, make_env, make_policy, samples_of, train

__all__ = ["TrainConfig", "make_agent", "make_env", "make_policy", "samples_of", "train"]
