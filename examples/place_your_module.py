"""Place a module of your own on the devices of this machine, and run the plan.

    python examples/place_your_module.py

Writes plan.json into the current folder. Half a minute, most of it imports and compilation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from placement import Cluster, Problem, capture, load_plan, make_plan, planners
from placement.costs.measure import load_or_measure


class TwoTowers(nn.Module):
    """Two branches that could run side by side."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.left(x) * self.right(y)).sum(1)


def main() -> None:
    torch.manual_seed(0)
    module = TwoTowers().eval()
    example = (torch.randn(32, 256), torch.randn(32, 256))

    # What is there to place, and where? One CPU device per core here, or GPUs.
    graph = capture(module, example, name="two towers")
    cluster = Cluster.detect()
    # Every operator on every device; kept in ~/.cache/placement for the next time.
    profile = load_or_measure(graph, cluster, repeats=3)
    problem = Problem(graph, cluster, profile, objective="period", num_microbatches=16)

    planner = planners.load("local_search", seconds=1.0, seed=0)
    solution = planner(problem)
    plan = make_plan(problem, solution, planner="local_search")
    plan.save("plan.json")
    print(f"{graph.num_ops} operators on {', '.join(cluster.device_names)}")
    print(f"predicted: a result every {1e6 * plan.predicted.period_s:.0f} µs")

    # Anywhere, later: the plan is data, the module is yours.
    batches = [(torch.randn(32, 256), torch.randn(32, 256)) for _ in range(16)]
    with load_plan("plan.json").bind(module, example) as runner, torch.inference_mode():
        for batch, result in zip(batches, runner.stream(batches), strict=True):
            torch.testing.assert_close(result, module(*batch))
    print(f"{len(batches)} results, equal to the plain module's; the plan is in plan.json")


if __name__ == "__main__":
    main()
