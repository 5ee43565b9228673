"""A first policy: PPO of stable-baselines3 on fresh problems, from chance; then it plans.

placement plan examples/branches.json --planner policy policy=policy.safetensors
"""

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from agents.policy import PlacementPolicy

torch.set_num_threads(1)  # the network is small: threads would wait for each other
env_id = "envs:envs/SequentialDevicePlacement-v0"
arguments = {"problems": "envs.generators:Layered", "observe": "graph"}
env = make_vec_env(env_id, 8, seed=0, env_kwargs=arguments)
unseen = make_vec_env(env_id, 1, seed=99, env_kwargs=arguments)
network = {"finish_weight": 0}  # 4, the default: it begins as list scheduling, not at chance
options = {"n_steps": 64, "batch_size": 128, "learning_rate": 1e-3, "gamma": 1.0, "seed": 0}
agent = PPO(PlacementPolicy, env, policy_kwargs={"network": network}, **options)
before, _ = evaluate_policy(agent, unseen, n_eval_episodes=50, deterministic=False)
agent.learn(8_000)
after, _ = evaluate_policy(agent, unseen, n_eval_episodes=50, deterministic=False)
print(f"mean reward on unseen problems: {before:.3f} before, {after:.3f} after")
agent.policy.trained().save("policy.safetensors")
