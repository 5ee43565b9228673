"""Hydra configuration files, read as `pkg://conf`."""
