"""An environment of one's own: rules, the class that shows them, and a formulation that names both.

placement-train 'workload=[]' synthetic=[layered] training.formulation=own_environment:pairs
    (where Python finds own_environment.py)
"""

import numpy as np

from agents.encoder import NetworkConfig
from agents.training import TrainConfig, train
from envs.formulations import Formulation, formulation_of
from envs.generators import small_problems
from envs.sequential import SequentialDevicePlacementEnv, SequentialRules


class PairRules(SequentialRules):
    """A group at a time; when two devices are in use, no third one is legal."""

    def observe(self):
        seen = super().observe()
        for mask, devices in zip(seen["mask"], self.choices, strict=True):  # int8 [D], int32 [G]
            used = np.unique(devices[devices >= 0])
            if len(used) >= 2 and mask[used].any():
                mask[np.setdiff1d(np.arange(len(mask)), used)] = 0
        self._mask = seen["mask"].copy()  # what is legal in the next step
        return seen


class PairEnv(SequentialDevicePlacementEnv):
    rules_of = PairRules


sees = formulation_of("sequential").sees  # the network reads what that of `sequential` reads
pairs = Formulation("own_environment:pairs", env="own_environment:PairEnv", sees=sees)

if __name__ == "__main__":
    network = NetworkConfig(hidden=32, finish_weight=0)
    config = TrainConfig(total_steps=6000, network=network, formulation=pairs.name)
    policy = train(small_problems(), config=config)
    print("devices in use, at most:", max(len(set(policy.place(p)[0])) for p in small_problems()))
