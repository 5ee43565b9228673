"""HSDAG (Duan et al., NeurIPS 2024): operators join the cluster of their heaviest producer.

Or they begin one; then each cluster is placed, and both are learned together. How it differs from
the paper: docs/published_methods.md

    python examples/published/run.py hsdag
"""

from __future__ import annotations

from dataclasses import replace

import hdp

from agents.encoder import NetworkConfig
from agents.training import TrainConfig


class JoinNet(hdp.ClusterNet):
    """Whether a group joins its producer's cluster, then the device of each cluster."""

    clusters = 0


formulation = replace(
    hdp.formulation,
    name="hsdag:formulation",
    network="hsdag:JoinNet",
    options={"clusters": 0},
)
CONFIG = TrainConfig(
    formulation=formulation.name,
    cold=True,
    gae_lambda=1.0,
    learning_rate=1e-3,
    last_learning_rate=1e-4,
    network=NetworkConfig(encoder="sage", layers=2, hidden=128),
)
