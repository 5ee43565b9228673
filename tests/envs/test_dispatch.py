"""``Dispatch-v0``: untrained it is list scheduling; its features are what they are said to be."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agents.dispatch import DispatchConfig, DispatchNet, answer, decode, decodes
from agents.encoder import PolicyError
from agents.planner import PolicyPlanner
from agents.store import GraphStore
from agents.trained import TrainedPolicy, untrained_net
from agents.training import TrainConfig, train
from agents.training.tasks import Start, Tasks
from envs.dispatch import HEFT, MIXED, DispatchEnv, Dispatcher, DispatchRules, kernels, no_network
from envs.formulations import FORMULATIONS, Formulation
from envs.generators import Latency, Models, Shops, TaskGraphs
from envs.problem_set import ProblemSet, choice_of
from placement.objective import Objective
from placement.planners import load
from placement.planners.heft import Heft
from placement.planners.order_search import turned
from placement.planners.peft import optimistic_cost
from placement.problem import Problem
from placement.schedule import in_sequence
from placement.search.evaluation import INFEASIBLE, Search
from placement.simulator import score, simulate, value_of
from placement.workloads.synthetic import families, giph
from tests.problems import chain, random_problem, small_problem

SEEDS = range(24)


def drawn(seed: int) -> Problem:
    """Of every kind: shops, task graphs, models, and small ones with groups and what is missing."""
    rng = np.random.default_rng(seed)
    if seed % 4 == 3:
        problem = random_problem(seed, grouped=seed % 8 == 3, unsupported=seed % 3 == 0)
        return replace(problem, objective=Objective.LATENCY)
    return (Shops, TaskGraphs, Models)[seed % 4]()(rng)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_the_weights_of_heft_it_is_heft(seed: int) -> None:
    problem = drawn(seed)
    heft, episode = Heft()(problem), Dispatcher(problem, HEFT)
    episode.construct(no_network(), 4.0)
    assert np.array_equal(episode.placement, heft.placement)
    assert episode.state.placed.finish_s.max() == heft.stats["makespan_s"]
    order = episode.state.sequence
    assert np.array_equal(order, np.argsort(problem.rank_position))
    if not problem.contention and episode.ordered:  # its own timetable, or one without idle time
        assert episode.value_s() <= heft.stats["makespan_s"] * (1 + 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_one_by_one_make_the_same_as_the_whole_episode(seed: int) -> None:
    problem = drawn(seed)
    rules = DispatchRules(ProblemSet((problem,), np.ones(1)), 1)
    rules.start(np.zeros(1, np.int64), np.zeros(1, np.int64))
    done = np.zeros(1, bool)
    while not done[0]:
        seen = rules.observe()
        assert seen["mask"].sum() == rules.masks().sum() > 0
        best = np.where(seen["mask"][0] == 1, seen["score"][0], -np.inf).argmax()
        reward, done = rules.act(np.array([best]))
    untrained = untrained_net(None, "dispatch")
    choice, value_s = answer(untrained, problem)
    assert np.array_equal(rules.choices[0, : len(choice)], choice)
    assert rules.value_s[0] == value_s
    assert np.isfinite(value_s) == (reward[0] > -5.0)


def test_the_value_is_that_of_the_order_that_was_made() -> None:
    for seed in SEEDS:
        problem = drawn(seed)
        policy = TrainedPolicy(untrained_net(None, "dispatch"))
        solution = PolicyPlanner(policy, evaluations=4)(problem)
        assert solution.value_s == pytest.approx(value_of(problem, solution), rel=1e-9)
        assert solution.stats["evaluations"] <= 4
        if solution.schedule is not None:
            solution.schedule.check(problem.graph, problem.cluster, solution.placement)
        else:
            assert solution.value_s == score(problem, solution.placement[None])[0]


def test_it_is_never_worse_than_its_rule() -> None:
    torch.manual_seed(0)
    net = DispatchNet()
    torch.nn.init.normal_(net.out.weight, std=3.0)  # it decides wildly
    for seed in SEEDS[:8]:
        problem = drawn(seed)
        rule = answer(untrained_net(None, "dispatch"), problem)[1]
        solution = PolicyPlanner(TrainedPolicy(net), evaluations=2)(problem)
        assert solution.value_s <= rule * (1 + 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_from_the_end_it_is_an_order_that_can_run(seed: int) -> None:
    problem = drawn(seed)
    episode, edges = Dispatcher(problem, backward=True), problem.graph.edges
    if not episode.ordered:
        return
    for draw in (None, 3):
        episode.construct(no_network(), 1.0, draw)
        place, position = problem.check_placement(episode.placement), np.argsort(episode.sequence)
        assert (position[edges[:, 0]] < position[edges[:, 1]]).all()
        schedule = in_sequence(place, episode.sequence, problem.num_devices)
        run = simulate(problem, place, schedule, num_microbatches=1)
        assert episode.value_s() == pytest.approx(float(run.end_s.max()), rel=1e-9)
        if not problem.mean_transfer_s.any():  # what waits for nothing but operators turns round
            assert episode.value_s() <= episode.state.placed.finish_s.max() * (1 + 1e-9)


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_turned_twice_it_is_the_same_work(seed: int) -> None:
    problem = drawn(seed)
    again = turned(turned(problem))
    edges = [np.unique(p.graph.edges, axis=0) for p in (again, problem)]
    assert np.array_equal(*edges)
    assert np.array_equal(again.compute_s, problem.compute_s)
    assert np.array_equal(again.link_latency_s, problem.link_latency_s)
    assert turned(problem).graph.num_groups == problem.graph.num_groups


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_a_part_of_an_episode_is_drawn_anew(seed: int) -> None:
    problem, net = drawn(seed), no_network()
    episode, n = Dispatcher(problem), problem.num_ops
    episode.construct(net, 1.0, 7)
    past, value_s = episode.past, episode.value_s()

    def same(first: int, last: int, seed: int) -> bool:
        episode.again(net, 1.0, seed, past, first, last)
        played = episode.past
        assert sorted(played[0].tolist()) == list(range(n))
        before = past[0][: max(0, first)]
        assert np.array_equal(played[0][: len(before)], before)
        assert np.array_equal(played[1][before], past[1][before])
        return all(map(np.array_equal, played, past)) and episode.value_s() == value_s

    assert same(0, 0, 1)  # nothing is: what follows is the past
    assert same(n, n + 5, 2)
    assert same(0, n, 7)  # everything is, with the same draws
    assert not all(same(n // 4, n // 2, k) for k in range(3, 9)) or n < 30


def test_parts_that_are_drawn_anew_improve_it() -> None:
    net, gains = untrained_net(None, "dispatch"), []
    for seed in SEEDS[:12]:
        search = Search(drawn(seed), None, 120)
        stats = decode(net, search, 8, seed, 100)
        assert search.num_evaluations <= 120
        if search.best_s == np.inf:
            continue
        gains.append(np.log(stats["best_of_k_value_s"] / stats["again_value_s"]))
        assert gains[-1] >= 0.0
        assert search.best_s == stats["again_value_s"]
    assert np.mean(gains) > 0.002


def test_samples_that_are_alike_are_drawn_hotter(monkeypatch: pytest.MonkeyPatch) -> None:
    sure = untrained_net({"finish_weight": 64.0}, "dispatch")  # the rule, but cold
    really = decodes.evaluate

    def differ(seed: int) -> int:
        values = set()
        monkeypatch.setattr(decodes, "evaluate", lambda *x: values.add(y := really(*x)) or y)
        decode(sure, Search(giph(seed), None, 40), 36, seed)
        return len(values)

    hot = sum(differ(seed) for seed in range(4))  # 72 to 83 of 160, by what is drawn
    monkeypatch.setattr(decodes, "_ALIKE", 0.0)
    assert hot > 2 * sum(differ(seed) for seed in range(4))  # 19 to 22


def test_memory_that_binds_is_kept() -> None:
    tight = replace(families()["transformer_training"](1), objective=Objective.LATENCY)
    assert tight.memory_may_bind
    solution = PolicyPlanner(TrainedPolicy(untrained_net(None, "dispatch")), k=2)(tight)
    assert np.isfinite(solution.value_s)
    assert solution.value_s == value_of(tight, solution)


@pytest.mark.parametrize("seed", range(6))
def test_samples_count_in_memory_what_the_greedy_decode_had_to(seed: int) -> None:
    tight = replace(families()["transformer_training"](seed), objective=Objective.LATENCY)
    made = decodes._Decodes(untrained_net(None, "dispatch"), Search(tight, None, 100))
    found = made.greedily()
    if found.get("greedy_value_s", np.inf) < INFEASIBLE:
        again = found["greedy_value_s"]
        made._ways[0].construct(*made._decided_by(0, False))
        assert decodes.evaluate(made.search, made._ways[0]) == again


def test_an_illegal_action_ends_the_episode_though_all_groups_have_a_device() -> None:
    """The first operator of the only group decides for all."""
    problem = small_problem(np.ones((3, 2)), chain(3), graph={"group": [0, 0, 0]})
    env = DispatchEnv([problem])
    env.reset(seed=0)
    env.step(0)
    *_, reward, terminated, _, info = env.step(59)
    assert terminated and reward == -5 and info["value_s"] == np.inf


@pytest.mark.parametrize("seed, encoder", [(0, None), (1, None), (2, "sage"), (3, "gin")])
def test_the_network_in_the_kernel_is_the_one_that_learns(seed: int, encoder: str | None) -> None:
    torch.manual_seed(seed)
    net = DispatchNet(DispatchConfig(scorer=8, encoder=encoder, layers=2))
    for weight in (net.out.weight, net.linear.weight):
        torch.nn.init.normal_(weight)
    problem = drawn(seed)
    rules = DispatchRules(ProblemSet((problem,), np.ones(1)), 1)
    rules.start(np.zeros(1, np.int64), np.zeros(1, np.int64))
    for _ in range(problem.num_ops // 2):
        rules.act(np.zeros(1, np.int64))
    state = rules.episode(0).state
    room = np.zeros((kernels.PAIRS, 8), np.float32), np.zeros(8, np.float32)
    tables = rules.episode(0).tables
    kernels.judge(tables, state, net.weights(problem), net.config.finish_weight, *room)
    obs = {k: torch.from_numpy(v) for k, v in rules.observe().items()}
    with torch.no_grad():
        store = GraphStore([problem])
        one = torch.zeros(1).long()
        logits = net.evaluate(store, one, net.encode(store, one), one, obs)[0]
    n = state.count
    np.testing.assert_allclose(logits[0, :n], state.logits[:n], rtol=1e-4, atol=1e-4)
    assert (logits[0, n:] < -1e8).all()


def soft(x: float, scale: float = 1.0) -> float:
    return x / (scale + abs(x))


def reference(problem: Problem, episode: Dispatcher, k: int) -> dict[str, float]:
    """Some features of pair ``k``, from the operators that are placed, without the kernel."""
    s, g, compute = episode.state, problem.graph, problem.compute_s
    op, d = int(s.op[k]), int(s.device[k])
    placed = s.sequence[: s.num_placed].tolist()
    where = {n: int(s.placed.choice[g.group[n]]) for n in placed}
    end = {n: s.start_s[n] + compute[n, where[n]] for n in placed}
    unit = problem.mean_compute_s.mean()
    rank, follow = problem.upward_rank_s, optimistic_cost(problem)
    devices = range(problem.num_devices)
    free = [max([end[n] for n in placed if where[n] == e], default=0.0) for e in devices]
    makes = {n: set(g.edges[g.edges[:, 1] == n, 0].tolist()) for n in range(problem.num_ops)}
    ready = sorted(
        (n for n in makes if n not in where and makes[n] <= set(placed)),
        key=lambda n: problem.rank_position[n],
    )
    offered = ready[: kernels.OPS]

    def begin(n: int, e: int) -> float:
        there = 0.0
        for i in g.in_tensor[g.in_ptr[n] : g.in_ptr[n + 1]]:
            src = int(g.tensor_src[i])
            if src >= 0:
                there = max(there, end[src] + problem.transfer_s(int(i), where[src], e))
        busy = sorted((s.start_s[m], end[m]) for m in placed if where[m] == e and compute[m, e] > 0)
        for start in sorted([there, *(b for _, b in busy if b > there)]):
            if all(b <= start or a >= start + compute[n, e] for a, b in busy):
                return start
        raise AssertionError

    able = {n: np.flatnonzero(problem.supported[n]) for n in offered}
    begins = {(n, e): begin(n, int(e)) for n in offered for e in able[n]}
    ends = {(n, e): b + compute[n, e] for (n, e), b in begins.items()}
    mine = {e: ends[op, e] for e in able[op]}
    best = {n: min(ends[n, e] for e in able[n]) for n in offered}
    left = [n for n in range(problem.num_ops) if n not in where]
    demand = np.zeros(len(free))
    for n in left:
        demand += np.where(problem.supported[n], compute[n], 0.0) / problem.supported[n].sum()
    done = np.array(free) + demand
    latest = max(free)
    bound = max(min(ends[n, e] + follow[n, e] for e in able[n]) for n in offered)
    rivals = [n for n in offered if n != op and begins.get((n, d), np.inf) < mine[d]]
    users = g.edges[g.edges[:, 0] == op, 1].tolist()
    return {
        "rank below that of the first offered": soft((rank[ready[0]] - rank[op]) / unit, 5),
        "rank over the longest path": rank[op] / rank.max(),
        "end above that on the operator's best device": soft((mine[d] - best[op]) / unit),
        "the same with the optimistic cost of what follows": soft(
            (mine[d] + follow[op, d] - min(mine[e] + follow[op, e] for e in mine)) / unit
        ),
        "start after the first that can start": soft((begins[op, d] - min(begins.values())) / unit),
        "end after the first that can end": soft((mine[d] - min(ends.values())) / unit),
        "idle time before it": soft(max(0.0, begins[op, d] - free[d]) / unit),
        "1 if it fills a gap": float(mine[d] <= free[d] and free[d] > 0),
        "seconds over the mean operator": soft(compute[op, d] / unit),
        "one over the devices that it can run on": 1 / len(able[op]),
        "when the device is free, above the mean device": soft((free[d] - np.mean(free)) / unit, 5),
        "when the device will have done what may come, above the mean device": soft(
            (done[d] - done.mean()) / unit, 5
        ),
        "the same over the largest": done[d] / done.max(),
        "consumers": soft(len(users)),
        "consumers that wait for nothing else": soft(
            sum(makes[n] - set(placed) == {op} for n in users)
        ),
        "share of operators that are placed": len(placed) / problem.num_ops,
        "operators that are ready": len(ready) / (len(ready) + len(free)),
        "end beyond the latest end so far": soft((mine[d] - latest) / unit),
        "end and the least that follows, beyond the bound of all": soft(
            (mine[d] + follow[op, d] - max(bound, latest)) / unit, 5
        ),
        "rank of the most urgent other that could begin here before its end, above its own": (
            soft((max(rank[n] for n in rivals) - rank[op]) / unit, 5) if rivals else -1.0
        ),
    }


@pytest.mark.parametrize("seed", [s for s in SEEDS if s % 4 != 3])
def test_features_are_what_they_are_said_to_be(seed: int) -> None:
    problem = drawn(seed)
    if problem.memory_may_bind or problem.graph.num_groups < problem.num_ops:
        problem = Shops()(np.random.default_rng(seed))
    episode = Dispatcher(problem, (*MIXED[:4], 0.0))  # without channels
    rng = np.random.default_rng(seed)
    t, s = episode.tables, episode.state
    kernels.begin(t, s)
    stop = int(rng.integers(problem.num_ops))
    for step in range(stop + 1):
        kernels.offer(t, s)
        if step < stop:
            kernels.take(t, s, int(rng.integers(s.count)))
    for k in range(s.count):
        for name, value in reference(problem, episode, k).items():
            seen = s.features[k, kernels.PAIR_FEATURES.index(name)]
            assert seen == pytest.approx(value, abs=2e-5), (name, k)


@pytest.mark.parametrize(
    ("options", "gain", "encoder"),
    [({}, 0.15, "sage"), ({"imitate": True}, 0.07, None), ({"without": [5, 6]}, 0.15, None)],
)
def test_training_improves_it(options: dict[str, Any], gain: float, encoder: str | None) -> None:
    """From chance, on four problems: what it samples gets shorter, and the best check is kept."""
    rng, rows = np.random.default_rng(0), list[dict[str, float]]()
    shops = [p for p in (Shops()(rng) for _ in range(30)) if p.num_ops <= 60][:4]
    network = DispatchConfig(finish_weight=0.0, scorer=16, encoder=encoder, layers=1)
    chosen = {"learning_rate": 1e-2, "entropy": 0.0, "last_entropy": 0.0, "network": network}
    chosen |= {"num_envs": 1, "steps_per_env": 3_000, "epochs": 1, "num_checks": 2}
    chosen |= {"algorithm": "agents.dispatch.train:GroupRelative"}
    chosen |= {"algorithm_options": {"episodes": 16, "keep": 0.5, **options}}
    config = TrainConfig(60_000, "dispatch", **chosen)
    policy = train(shops, config=config, callback=rows.append)
    rewards = [row["reward_mean"] for row in rows[1:]]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + gain
    assert policy.card["greedy_speedup"] >= rows[0]["greedy_speedup"]
    for layer in (policy.net.linear, policy.net.pair):
        assert bool(layer.weight[:, [5, 6]].any()) is ("without" not in options)
    again = train(shops, config=config)
    assert again.card["greedy_speedup"] == policy.card["greedy_speedup"]


class FirstAloneRules(DispatchRules):
    """Only the pair that is offered first may be taken."""

    def observe(self) -> Any:
        seen = super().observe()
        seen["mask"][:, 1:] = 0
        return seen


class FirstAloneEnv(DispatchEnv):
    rules_of = FirstAloneRules


sees = FORMULATIONS["dispatch"].sees
first_alone = Formulation(
    "test_dispatch:first_alone", "test_dispatch:FirstAloneEnv", sees, "agents.dispatch:DispatchNet"
)


def test_rules_of_ones_own_are_played_by() -> None:
    """The kernels that answer for ``dispatch`` would not know of them."""
    problem = drawn(1)
    rules = FirstAloneRules(ProblemSet.build([problem]), 1)
    rules.start(np.array([0]), np.array([0]))
    while not rules.decide(np.array([0]))[0]:
        pass
    theirs = untrained_net(None, first_alone.name)
    config = TrainConfig(total_steps=64, formulation=first_alone.name, num_checks=1)
    choices, _, _ = Tasks.of([problem], config, Start()).answers(config, theirs)
    assert np.array_equal(choices[0, : problem.graph.num_groups], rules.choices[0])
    assert not np.array_equal(choices[0], choice_of(problem, answer(theirs, problem)[0]))
    measured = Start(evaluator=lambda _, placements: np.full(len(placements), 7.0))
    ours = replace(config, formulation="dispatch")
    seconds = Tasks.of([problem], ours, measured).answers(ours, untrained_net(None, "dispatch"))[1]
    assert seconds.tolist() == [7.0]  # not what a kernel predicts
    planner = PolicyPlanner(TrainedPolicy(theirs), 0, search=False, baseline="single_device")
    expected = score(problem, rules.choices[:, problem.graph.group])[0]
    assert planner(problem).stats["greedy_value_s"] == pytest.approx(expected)
    episodes = replace(config, algorithm="agents.dispatch.train:GroupRelative")
    with pytest.raises(PolicyError, match="trains the formulation dispatch, not test_dispatch"):
        train([problem], config=episodes)


@pytest.mark.parametrize(
    ("algorithm", "most"),
    [("agents.dispatch.train:GroupRelative", 16), ("stable_baselines3:PPO", 4)],
)
def test_episodes_of_a_problem_are_evaluated_at_once(algorithm: str, most: int) -> None:
    """Where placements run, a round begins with the best so far: one placement each is a waste."""
    sizes: list[int] = []

    def noted(problem: Problem, placements: Any) -> Any:
        sizes.append(len(placements))
        return score(problem, placements)

    recipe = {"algorithm": algorithm, "formulation": "dispatch", "num_envs": most}
    config = TrainConfig(total_steps=100, num_checks=1, **recipe)
    train([drawn(1)], config=config, evaluator=noted)
    assert max(sizes[1:]) == most  # episodes of a problem, or environments; first the references


def test_what_cannot_run_is_worse_than_what_can_in_any_unit() -> None:
    problem = drawn(1)

    def learned(unit: float) -> torch.Tensor:
        def some(problem: Problem, placements: Any) -> Any:
            return np.where(placements[:, 0] == 0, np.inf, unit * score(problem, placements))

        recipe = {"algorithm": "agents.dispatch.train:GroupRelative", "formulation": "dispatch"}
        config = TrainConfig(total_steps=5_000, num_checks=1, learning_rate=1e-2, **recipe)
        weights: torch.Tensor = train([problem], config=config, evaluator=some).net.linear.weight
        return weights

    assert torch.allclose(learned(1e-3), learned(1e3), atol=1e-5)


def test_what_is_held_out_is_never_drawn() -> None:
    sizes = Latency.sizes
    rng = np.random.default_rng(0)
    for _ in range(100):
        problem = Latency()(rng)
        assert problem.graph.num_groups <= sizes.groups and problem.num_devices <= sizes.devices
        assert problem.objective is Objective.LATENCY
    assert all(load("heft")(Models()(rng)).value_s > 0 for _ in range(3))
