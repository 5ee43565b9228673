"""PPO in one file, without stable-baselines3: Gymnasium's vector environment and torch alone."""

import gymnasium as gym
import torch
from torch import nn

torch.manual_seed(0), torch.set_num_threads(1)  # threads would wait for each other
fresh = {"problems": "envs.generators:Layered", "observe": "graph"}
env = gym.make_vec("envs:envs/DevicePlacement-v0", 32, **fresh)
see = {k: box.shape for k, box in env.single_observation_space.items()}
width = see["nodes"][1] + see["device_features"][1] + see["pair_features"][2]
actor = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 1))
critic = nn.Sequential(nn.Linear(see["nodes"][1], 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-3)


def look(obs):  # the distribution of every group's device, and the value [B]
    nodes, pairs, shape = obs["nodes"], obs["pair_features"], (*obs["supported"].shape, -1)
    rows = nodes[:, :, None].expand(shape), obs["device_features"][:, None].expand(shape), pairs
    logits = actor(torch.cat(rows, dim=3)).squeeze(3)
    logits = logits.masked_fill(obs["supported"] == 0, -1e9)
    return torch.distributions.Categorical(logits=logits), critic(nodes.mean(1)).squeeze(1)


obs, _ = env.reset(seed=0)
for update in range(60):
    seen = {k: torch.as_tensor(v) for k, v in obs.items()}
    action = look(seen)[0].sample()
    old = look(seen)[0].log_prob(action).mean(1).detach()
    obs, reward, *_ = env.step(action.numpy())  # an episode is one step
    for _ in range(4):
        choice, value = look(seen)
        gain = torch.as_tensor(reward).float() - value
        ratio = (choice.log_prob(action).mean(1) - old).exp()
        advantage = (gain - gain.mean()).detach() / (gain.std().detach() + 1e-6)
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = -clipped.mean() + 0.5 * gain.square().mean() - 0.003 * choice.entropy().mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    if update % 10 == 9:
        print(f"{32 * (update + 1)} placements: reward {reward.mean():.3f}")
