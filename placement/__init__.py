"""Decide where every operator of a PyTorch model runs, and in which order."""
