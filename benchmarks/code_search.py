"""Does a swarm learn to complete erasure codes, and is that worth its rewards beside plain search?

learn    four peers learn the task `codes` from a school of worked solutions with mistakes in them: held-out problems
         solved by one draw, before and after, paid by what a code is worth, and paid for right answers alone
search   the same held-out problems by draws of the policy, blind draws, climbing and a greedy rule, at as many rewards
         that are looked at; and what learning's own rewards would have bought

Learning is computed by one of four peers with equal weights for all (benchmarks/consensus.py says why).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.code_rivals import Search, best, blind, climb, greedy, text
from benchmarks.common import RUNS, Claim, Row, conclude, parser, start, write

if TYPE_CHECKING:
    from planaria.swarm.config import SwarmConfig
    from planaria.swarm.policy.base import Policy
    from planaria.swarm.tasks.base import Problem
    from planaria.swarm.tasks.codes import Codes

NAME = "code_search"
LOOKS = (1, 4, 16, 64)
"""rewards that are looked at for one problem"""


@dataclass(frozen=True)
class Learned:
    """What one seed's learning came to: solved shares by one draw (before, after), and by the best of several."""

    curve: list[float]
    before: dict[int, float]
    after: dict[int, float]


def recipe(given: argparse.Namespace, name: str, seed: int) -> SwarmConfig:
    from planaria.config import shipped
    from planaria.config.recipe import read
    from planaria.swarm.config import SwarmConfig

    plain: dict[str, Any] = read(shipped.find("code_swarm")) | {"name": name, "seed": seed}
    plain["task"] = {"name": "codes", "options": options(given)}
    plain["school"] = {"steps": given.school, "seed": seed}
    plain["rounds"] = plain["rounds"] | {"count": given.rounds, "keep": 0}
    plain["evaluate"] = {"every": 10, "problems": 1000}
    plain["optim"] = {"lr": given.lr}
    return SwarmConfig.model_validate(plain)


def options(given: argparse.Namespace) -> dict[str, Any]:
    return {key: getattr(given, key) for key in ("shards", "data", "distance", "weight", "degree", "shown")}


def learn(given: argparse.Namespace, arm: str, seed: int, problems: Sequence[Problem]) -> Learned:
    """One run of a swarm, kept: all its rounds as its first peer lives through them."""
    config = recipe(given, f"{arm}-{seed}", seed)
    folder = RUNS / NAME / config.name.replace(" ", "_")
    kept, said = folder / "learned.json", f"{config.model_dump_json()} {given.problems}"
    if kept.is_file() and (found := json.loads(kept.read_text()))["said"] == said:
        return Learned(found["curve"], *({int(k): v for k, v in found[when].items()} for when in ("before", "after")))
    shutil.rmtree(folder, ignore_errors=True)
    learned = ran(given, config, arm, problems, folder)
    print(f"{config.name}: {' '.join(f'{x:.3f}' for x in learned.curve)}; {learned}", flush=True)
    write(kept, json.dumps(asdict(learned) | {"said": said}))
    return learned


def ran(given: argparse.Namespace, config: SwarmConfig, arm: str, problems: Sequence[Problem], folder: Path) -> Learned:
    from benchmarks.consensus import together
    from planaria.swarm.assemble import policy_of, task_of
    from planaria.swarm.records.lines import LOG, Evaluated, read_log
    from planaria.swarm.tasks.codes import Codes

    task: Any = task_of(config)
    policy = policy_of(config, task, print)  # one school for both arms
    before = drawn_best(given, config, policy, problems, task)
    if arm == "right alone":
        task = only_right(Codes)(**options(given))
    together(config, folder, task, policy)
    curve = [r.accuracy.rate or 0.0 for r in read_log(folder / "p0" / LOG) if isinstance(r, Evaluated)]
    after = drawn_best(given, config, policy, problems, task)
    return Learned(curve, before, after)


def only_right(base: type[Codes]) -> type[Codes]:
    """The same task, that pays nothing for a part of the way."""

    class OnlyRight(base):  # type: ignore[valid-type, misc]
        def score(self, problem: Problem, completion: str) -> float:
            return float(super().score(problem, completion) == 1)

    return OnlyRight


def drawn_best(
    given: argparse.Namespace, config: SwarmConfig, policy: Policy, problems: Sequence[Problem], task: Codes
) -> dict[int, float]:
    """Share of problems that the best of so many draws of a policy solves."""
    from planaria.swarm.draws import generator
    from planaria.swarm.rollout import ask

    solved: dict[int, list[bool]] = {looks: [] for looks in LOOKS}
    for n, problem in enumerate(problems):
        (found,) = policy.sample(
            [ask(problem, policy).prompt],
            max(LOOKS),
            config.sampling.max_new,
            config.sampling.temperature,
            config.sampling.support(policy.vocab),
            generator("best", config.seed, n),
        )
        right = [one.ended and task.solves(problem, policy.decode(one.ids)) for one in found]
        for looks, shares in solved.items():
            shares.append(any(right[:looks]))
    return {looks: fmean(shares) for looks, shares in solved.items()}


def searched(task: Codes, search: Search, problems: Sequence[Problem], seed: int, looks: int) -> float:
    rng = random.Random(seed)
    return fmean(best(search, task, problem, rng, looks) == 1 for problem in problems)


def constructed(task: Codes, problems: Sequence[Problem], seed: int, tries: int) -> float:
    """Share of problems that the greedy rule solves in so many tries, without looking at a reward."""
    rng, solved = random.Random(seed), []
    for problem in problems:
        columns = shown(task, problem)
        found = (greedy(task, columns, rng) for _ in range(tries))
        solved.append(any(task.solves(problem, text(task, hidden)) for hidden in found if hidden is not None))
    return fmean(solved)


def shown(task: Codes, problem: Problem) -> list[int]:
    columns = [0] * task.shown
    for edge in problem.prompt.rstrip("=").split(","):
        columns[int(edge[1:])] |= 1 << ord(edge[0]) - ord("a")
    return columns


def learning_rows(runs: dict[str, list[Learned]]) -> list[Row]:
    rows = []
    for arm, found in runs.items():
        rises = [run.curve[-1] - run.curve[0] for run in found]
        rows += [
            Row(f"{arm}: solved by one draw, before", [run.curve[0] for run in found], "all: 1"),
            Row(f"{arm}: the same, after", [run.curve[-1] for run in found], "all: 1"),
            Row(f"{arm}: rise", rises, "all: 1", Claim(low=0.1) if arm == GRADED else None, judged="least"),
        ]
    return rows


def search_rows(given: argparse.Namespace, task: Codes, runs: list[Learned], problems: Sequence[Problem]) -> list[Row]:
    rows = []
    for looks in LOOKS:
        sides = {
            "policy, before": [run.before[looks] for run in runs],
            "policy, after": [run.after[looks] for run in runs],
            "blind": [searched(task, blind, problems, seed, looks) for seed in given.seeds],
            "climb": [searched(task, climb, problems, seed, looks) for seed in given.seeds],
            "greedy, no reward": [constructed(task, problems, seed, looks) for seed in given.seeds],
        }
        rows += [Row(f"{looks} looks a problem: {side}", found, "all: 1") for side, found in sides.items()]
    spent = given.rounds * 16 * 12
    each = spent // len(problems) + 1
    for name, search in (("blind", blind), ("climb", climb)):
        found = [searched(task, search, problems, seed, each) for seed in given.seeds]
        lead = [run.after[1] - other for run, other in zip(runs, found, strict=True)]
        rows += [
            Row(f"{spent + len(problems)} looks at {len(problems)} problems in all: {name}", found, "all: 1"),
            Row(f"the same: policy after learning, less {name}", lead, "as good: 0"),
        ]
    return rows


GRADED = "worth"


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--rounds", type=int, default=60)
    flags.add_argument("--school", type=int, default=800, help="steps")
    flags.add_argument("--lr", type=float, default=1e-3)
    flags.add_argument("--problems", type=int, default=150, help="held out, for the searches")
    flags.add_argument("--arms", nargs="+", default=[GRADED, "right alone"])
    for key, usual in (("shards", 8), ("data", 4), ("distance", 3), ("weight", 4), ("degree", 3), ("shown", 4)):
        flags.add_argument(f"--{key}", type=int, default=usual)
    given = flags.parse_args()
    import torch

    from planaria.swarm.tasks.codes import Codes

    torch.set_num_threads(1)
    task = Codes(**options(given))
    problems = [task.problem(task.training + n) for n in range(given.problems)]
    runs = {arm: [learn(given, arm, seed, problems) for seed in given.seeds] for arm in given.arms}
    rows = learning_rows(runs) + search_rows(given, task, runs[given.arms[0]], problems)
    return conclude(NAME, given, rows, [f"{task.name}, {task.shown} shown; one draw: 1,000 held-out problems"])


if __name__ == "__main__":
    start(main)
