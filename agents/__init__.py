"""The learned planner: features, encoder, PPO policy, training, ``PolicyPlanner``."""
