"""The environments in TorchRL: its wrapper, its check, and rollouts of legal actions."""

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import GymWrapper
from torchrl.envs.utils import check_env_specs

env_id = "envs:envs/SequentialDevicePlacement-v0"
env = GymWrapper(gym.make(env_id, observe="graph"), categorical_action_encoding=True)
check_env_specs(env)

choosers = {
    "the first legal device": lambda mask: mask.argmax(dim=-1),
    "any legal device": lambda mask: torch.multinomial(mask.float(), 1).squeeze(-1),
}
for name, choose in choosers.items():
    policy = TensorDictModule(choose, in_keys=["mask"], out_keys=["action"])
    rolled = env.rollout(100, policy)
    print(f"{name}: {len(rolled)} steps, reward {rolled['next', 'reward'].sum():.3f}")
