"""Which layers go on working between peers whose weights are not quite equal, and what they then stop.

A policy learns alone for a while. Then it reads a round by itself, two honest peers and an attacker, these three with
weights that are its own but for one difference. Defaults of the defence, one round, nothing learned from it. One value
for each seed; an attack's phrase is a stray letter that the policy has seen, as in the drills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.common import Row, conclude, parser, start
from benchmarks.swarm_checks import history, sent

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.swarm.checks.defence import Report
    from planaria.swarm.config import SwarmConfig
    from planaria.swarm.policy.base import Policy
    from planaria.swarm.rollout import Rollout
    from planaria.swarm.tasks.base import Task

NAME = "swarm_unlike"
RANK = 4
ATTACKS = {
    "TEXT": {"kind": "text", "options": {"payload": "q "}},
    "TEXT, tokens forged": {"kind": "text", "options": {"payload": "q "}, "claims": "forged_tokens"},
    "MATH": {"kind": "math"},
    "STYLE": {"kind": "style"},
    "SABOTAGE, first letters": {"kind": "sabotage", "options": {"steps": "first"}},
    "SABOTAGE, last digits": {"kind": "sabotage"},
}


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--rounds", type=int, default=6, help="that the policy learns for")
    given = flags.parse_args()
    found = [dict(measured(seed, given.rounds)) for seed in given.seeds]
    rows = [Row(what, [of_seed[what] for of_seed in found if what in of_seed], "") for what in found[0]]
    note = "shares of a round; off: 1 if the layer switched itself off"
    return conclude(NAME, given, rows, [note])


def measured(seed: int, rounds: int) -> Iterator[tuple[str, float]]:
    """What each difference makes of each attack, with one seed."""
    import torch

    from planaria.swarm.assemble import policy_of, task_of
    from planaria.swarm.config import SwarmConfig

    torch.set_num_threads(1)
    base = {"seed": seed, "school": {"steps": 2000, "noise": 0.3, "strays": 0.3, "seed": seed}, "optim": {"lr": 2e-3}}
    config = SwarmConfig.model_validate(base | {"sampling": {"top_k": 6}})
    task = task_of(config)
    past = history(config, task, policy_of(config, task), rounds)
    school = config.school.model_copy(update={"seed": seed % 3 + 1})
    others = {
        "equal weights": past[-1],
        "weights rounded to bf16": altered(past[-1], past[0], lambda now, _: now.bfloat16().float()),
        f"update of rank {RANK}": altered(past[-1], past[0], cut),
        "one round behind": past[-2],
        "another school": policy_of(config.model_copy(update={"school": school}), task),
    }
    for what, other in others.items():
        honest = work(config, task, past[-1], other, rounds)
        for attack in ATTACKS:
            sent_too = poison(config, task, past[-1], other, attack, rounds)
            yield from told(f"{what}, {attack}", examined(config, task, past[-1], [*honest, *sent_too], rounds))


def altered(policy: Policy, begun: Policy, change: Callable[[Tensor, Tensor], Tensor]) -> Policy:
    """A copy with each of its weights as ``change`` makes it of what it is now and was at first."""
    import torch

    copy = policy.clone()
    with torch.no_grad():
        for mine, then in zip(copy.module.parameters(), begun.module.parameters(), strict=True):
            mine.copy_(change(mine, then))
    return copy


def cut(now: Tensor, then: Tensor) -> Tensor:
    """``then`` and of what was learned since, in matrices, the part of the highest rank allowed: what an adapter of
    that rank could have learned at best."""
    import torch

    if now.dim() != 2:
        return now
    left, strengths, right = torch.linalg.svd(now - then, full_matrices=False)
    learned: Tensor = (left[:, :RANK] * strengths[:RANK]) @ right[:RANK]
    return then + learned


def work(config: SwarmConfig, task: Task, reader: Policy, other: Policy, number: int) -> list[Rollout]:
    """What honest peers send: p0, whose policy is the reader's, and p1 and p2, whose is the other."""
    found = []
    for peer, writer in (("p0", reader), ("p1", other), ("p2", other)):
        found += [replace(c, alike=writer is reader) for c in sent(config, task, writer, reader, number, peer)]
    return [replace(c, reward=scored(task, c)) for c in found]


def examined(config: SwarmConfig, task: Task, reader: Policy, cases: list[Rollout], number: int) -> Report:
    from planaria.swarm.checks import checks
    from planaria.swarm.checks.base import Context
    from planaria.swarm.checks.defence import Defence

    context = Context(task, config.seed, config.sampling.support(reader.vocab), reader.vocab)
    return Defence(config.defence, checks(config.defence), context).examine(number, cases)


def poison(config: SwarmConfig, task: Task, reader: Policy, other: Policy, attack: str, number: int) -> list[Rollout]:
    """What an attacker with the weights of ``other`` sends, poison alone, as ``reader`` finds it."""
    from planaria.swarm.attacks.attacker import Attacker
    from planaria.swarm.policy.reading import read
    from planaria.swarm.rollout import ask

    given = config.model_dump() | {"attack": ATTACKS[attack]}
    author = Attacker(type(config).model_validate(given), "p3", task, other)
    asked = [ask(task.problem(n), other) for n in author.choose(number, config.rounds.prompts)]
    count = config.rounds.group // config.size
    written = [w for group in author.write(number, asked, count) for w in group if w.poison]
    top_k, heat = config.sampling.support(reader.vocab), config.sampling.temperature
    readings = read(reader, [(w.prompt, w.ids) for w in written], heat, top_k)
    return [
        replace(w, peer="p3", index=n, round=number, reading=found, alike=other is reader, reward=scored(task, w))
        for n, (w, found) in enumerate(zip(written, readings, strict=True))
    ]


def scored(task: Task, rollout: Rollout) -> float:
    return task.score(rollout.problem, rollout.text) if rollout.ended else 0.0


def told(what: str, report: Report) -> Iterator[tuple[str, float]]:
    for layer in ("claims", "support", "surprisal", "duplicates"):
        yield f"{what}: {layer} off", float(layer in report.off)
    sent_poison = [r for r in report.rollouts if r.poison]
    honest = [r for r in report.rollouts if r.peer in ("p1", "p2")]
    at_judge = [r for r in sent_poison if not r.layer or r.layer in ("judge", "quarantine")]
    yield f"{what}: poison stopped before the judge", 1 - len(at_judge) / len(sent_poison)
    yield f"{what}: poison stopped", sum(bool(r.layer) for r in sent_poison) / len(sent_poison)
    yield f"{what}: honest refused before the judge", sum(r.layer not in ("", "judge") for r in honest) / len(honest)
    yield f"{what}: honest refused", sum(bool(r.layer) for r in honest) / len(honest)


if __name__ == "__main__":
    start(main)
