"""GDP (Zhou et al., 2019) and GO (NeurIPS 2020): all groups at once.

GraphSAGE, then attention over all groups; trained with PPO. How it differs from the papers:
docs/published_methods.md

    python examples/published/run.py gdp
"""

from agents.encoder import NetworkConfig
from agents.training import TrainConfig

CONFIG = TrainConfig(
    formulation="one_shot",
    cold=True,
    gae_lambda=1.0,
    learning_rate=1e-3,
    last_learning_rate=1e-4,
    network=NetworkConfig(encoder="sage", layers=3, hidden=64, attention=2),
)
