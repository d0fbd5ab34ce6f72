"""How often the checks of likelihood refuse honest work: an equal peer's, one's own of later rounds, another model's.

A policy learns alone, and every eighth round its completions are read by itself as it was 0, 1, 4 and 8 rounds before:
so a peer sees the others that is as many rounds behind. Then those of a policy from another school are read, by whom
the check must switch itself off. One value for each seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.common import Claim, Row, conclude, parser, start

if TYPE_CHECKING:
    from planaria.swarm.checks.base import Check, Context
    from planaria.swarm.config import SwarmConfig
    from planaria.swarm.policy.base import Policy
    from planaria.swarm.rollout import Rollout
    from planaria.swarm.tasks.base import Task

NAME = "swarm_checks"
BEHIND = (0, 1, 4, 8)
EVERY = 8
CLAIMS = {0: Claim(high=0.0), 8: Claim(high=0.03)}
ELSEWHERE = 1000
"""what is added to the seed of another school"""


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--rounds", type=int, default=40, help="that the policy learns for")
    given = flags.parse_args()
    found = [dict(measured(seed, given.rounds)) for seed in given.seeds]
    rows = [
        Row(what, [of_seed[what] for of_seed in found], "", claim_of(what))
        for what in dict.fromkeys(what for of_seed in found for what in of_seed)
    ]
    return conclude(NAME, given, rows, ["measured: share refused; off: 1 if the layer switched itself off"])


def claim_of(what: str) -> Claim | None:
    """The claims are the support check's; the others are shown beside it."""
    check, _, case = what.partition(", ")
    if check != "support":
        return None
    if case == "another school":
        return Claim(low=0.2)
    if case == "another school: off":
        return Claim(low=1.0)
    return CLAIMS.get(int(case.split()[0]))


def measured(seed: int, rounds: int) -> Iterator[tuple[str, float]]:
    """What each check refused of whom, with one seed."""
    import torch

    from planaria.swarm.assemble import policy_of, task_of
    from planaria.swarm.checks import checks as made
    from planaria.swarm.checks.base import Context
    from planaria.swarm.checks.defence import Defence
    from planaria.swarm.config import SamplingConfig, SchoolConfig, SwarmConfig

    torch.set_num_threads(1)
    config = SwarmConfig(seed=seed, school=SchoolConfig(strays=0.1, seed=seed), sampling=SamplingConfig(top_k=6))
    task = task_of(config)
    past = history(config, task, policy_of(config, task), rounds)
    context = Context(task, seed, config.sampling.support(past[0].vocab), past[0].vocab)
    checks = made(config.defence.model_copy(update={"checks": "support, surprisal, duplicates"}))
    looks = range(EVERY, rounds + 1, EVERY)
    for behind in BEHIND:
        cases = [c for now in looks for c in sent(config, task, past[now], past[now - behind], now, "p1")]
        yield from refusals(checks, context, cases, f"{behind} rounds behind")
    elsewhere = config.model_copy(update={"school": config.school.model_copy(update={"seed": seed + ELSEWHERE})})
    other = policy_of(elsewhere, task)
    cases = [c for peer in ("p1", "p2", "p3") for c in sent(config, task, other, past[0], 0, peer)]
    yield from refusals(checks, context, cases, "another school")
    report = Defence(config.defence, checks, context).examine(0, cases)
    for check in checks:
        yield f"{check.name}, another school: off", float(check.name in report.off)


def refusals(
    checks: Sequence[Check], context: Context, cases: Sequence[Rollout], who: str
) -> Iterator[tuple[str, float]]:
    for check in checks:
        yield f"{check.name}, {who}", len(check.examine(cases, context).refused) / len(cases)


def history(config: SwarmConfig, task: Task, policy: Policy, rounds: int) -> list[Policy]:
    """The policy as it was after each of ``rounds`` rounds of learning alone, its start first."""
    from planaria.swarm.draws import shared_problems
    from planaria.swarm.peer import Shadow
    from planaria.swarm.rollout import ask

    alone, past = Shadow(config, "p0", task, policy), [policy.clone()]
    for number in range(rounds):
        chosen = shared_problems(config.seed, number, task.training, config.rounds.prompts)
        alone.round(number, [ask(task.problem(n), policy) for n in chosen], config.rounds.group)
        past.append(alone.learner.policy.clone())
    return past


def sent(config: SwarmConfig, task: Task, writer: Policy, reader: Policy, number: int, name: str) -> list[Rollout]:
    """A round of completions by ``writer`` as ``reader`` sees them, those that broke off left out."""
    from planaria.swarm.authors import HonestAuthor
    from planaria.swarm.draws import shared_problems
    from planaria.swarm.policy.reading import read
    from planaria.swarm.rollout import ask

    chosen = shared_problems(config.seed + 1, number, task.training, config.rounds.prompts)
    author = HonestAuthor(config, name, task, writer)
    written = [
        replace(rollout, peer=name, round=number, index=index)
        for rollouts in author.write(number, [ask(task.problem(n), writer) for n in chosen], config.rounds.group)
        for index, rollout in enumerate(rollouts)
        if rollout.ended
    ]
    readings = read(
        reader,
        [(rollout.prompt, rollout.ids) for rollout in written],
        config.sampling.temperature,
        config.sampling.support(reader.vocab),
    )
    return [replace(rollout, reading=reading) for rollout, reading in zip(written, readings, strict=True)]


if __name__ == "__main__":
    start(main)
