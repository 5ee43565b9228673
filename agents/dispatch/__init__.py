"""Learned dispatching: a network picks a ready operator and its device, until all are placed."""

from agents.dispatch.decodes import decode, evaluate, promising
from agents.dispatch.network import DispatchConfig, DispatchNet, answer

__all__ = ["DispatchConfig", "DispatchNet", "answer", "decode", "evaluate", "promising"]
