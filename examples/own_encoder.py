"""An encoder of one's own: a class of layer in a module, named in the configuration.

placement plan examples/branches.json --planner policy policy=own.safetensors \
    allow=own_encoder:Mean     (where Python finds own_encoder.py)
"""

import torch
from torch import Tensor, nn
from torch_geometric.utils import scatter

from agents.encoder import NetworkConfig
from agents.trained import TrainedPolicy
from agents.training import TrainConfig, train
from envs.generators import small_problems


class Mean(nn.Module):
    """A group hears the mean of what it uses, and of what uses it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.own = nn.Linear(3 * hidden, hidden)

    def forward(self, x: Tensor, batch, waves) -> Tensor:
        a, b = batch.edge_index
        before = scatter(x[a], b, dim_size=len(x), reduce="mean")
        after = scatter(x[b], a, dim_size=len(x), reduce="mean")
        return x + torch.relu(self.own(torch.cat([x, before, after], dim=1)))


if __name__ == "__main__":
    network = NetworkConfig(encoder="own_encoder:Mean", hidden=32, finish_weight=0)
    policy = train(
        small_problems(),
        config=TrainConfig(total_steps=6000, network=network),
        callback=lambda row: print(f"{row['steps']:.0f} steps: reward {row['reward_mean']:.3f}"),
    )
    policy.save("own.safetensors")
    again = TrainedPolicy.load("own.safetensors", allow=["own_encoder:Mean"])
    print("the file names its encoder:", again.net.config.encoder)
