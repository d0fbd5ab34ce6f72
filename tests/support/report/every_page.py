"""A page of every kind, of runs that never were: what all of them must keep is tested on these."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord, StepMetric, ValidationMetric
from planaria.lab.experts.budget import SYNCHRONISED, ExpertPlan
from planaria.lab.experts.experts_results import ArmResult, DomainScore, Results, SeedResult, TextWeights
from planaria.lab.experts.experts_spec import MixtureSpec
from planaria.lab.report import comparison, experts_report
from planaria.planner.initial_plans import random_routes
from planaria.planner.problem import PlanningProblem
from planaria.planner.schedule import ProvedBound, Schedule, SearchRecord, make_schedule
from planaria.report.run import report, schedule_page
from planaria.report.run.schedule_figures import step_of
from planaria.swarm.audit.audit_results import Audit, AuditCheck, AuditLimits, BehindCensor, Leakage, Leaked, LeakPoint
from planaria.swarm.audit.leakage import estimate
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.drill_arms import Drill, DrilledArm, DrillRun
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.records.lines import (
    LOG,
    PEERS,
    Evaluated,
    Finished,
    LayerCounts,
    Log,
    VoteSummary,
)
from planaria.swarm.records.outcome import ALL, EvaluationPoint, LayerOutcome, PeerOutcome, RunOutcome, read_outcome
from planaria.swarm.report import audit_report, drill_report, swarm_report
from support.report import synthetic_replicas as replicas
from support.report.synthetic_comparison import compared
from support.report.synthetic_run import Synthesis
from support.swarm.peer_records import round_done, started

S = 1_000_000_000
KINDS = ("run", "replicas", "comparison", "schedule", "swarm", "drill", "experts", "audit")


def body_of(kind: str, folder: Path) -> Iterator[str]:
    """Return the sections of a page of this kind; its sources may be written to ``folder``."""
    if kind == "run":
        return report.body(read_run(Synthesis(folder, rollbacks={27: 20}).write()))
    if kind == "replicas":
        return report.body(replicated())
    if kind == "comparison":
        return comparison.body(compared())
    if kind == "schedule":
        plan = planned()
        return schedule_page.body(plan, step_of(plan))
    if kind == "swarm":
        config, outcome = swarmed(folder)
        return swarm_report.body(folder, config, outcome)
    if kind == "drill":
        return drill_report.body(drilled())
    if kind == "audit":
        return audit_report.body(audited())
    return experts_report.body(mixed())


def replicated(rounds: int = 3) -> RunRecord:
    """Three replicas that settle rounds, one of them alone in each."""
    facts: list[e.Event | d.Decision] = [replicas.started(steps=rounds), *replicas.joined("abcdef")]
    facts += [replicas.form(replica, "abcdef"[2 * replica : 2 * replica + 2]) for replica in range(3)]
    for number in range(rounds):
        for replica in range(3):
            block = 3 * number + replica
            facts += [replicas.run_step(replica, number, block), replicas.commit(replica, number, block)]
        facts += [replicas.meet(number, 0, 1), replicas.settle(number, 0, 1)]
        facts += [
            replicas.made("abcdef"[node], node, number, blocking=10**6, spread=0.1 * (number + 1)) for node in range(4)
        ]
    facts.append(d.Finish(outcome="finished"))
    metrics = [
        ValidationMetric(t=9.0, step=step, val_loss=5 - step / 9, val_losses=dict.fromkeys(range(3), 5 - step / 9))
        for step in range(rounds)
    ]
    steps = [StepMetric(t=9.0, step=n, loss=5.0 - n / 9, tokens_per_s=100.0, grad_norm={}) for n in range(rounds)]
    return replicas.record(replicas.timed(facts), [*steps, *metrics])


def planned(microbatches: int = 3, sizes: tuple[int, ...] = (2, 2, 2, 2)) -> Schedule:
    """A schedule without optimization, with two alternatives."""
    nodes = sum(sizes)
    forward, backward = (np.array([[s] * nodes for s in kind]) * S for kind in ((1, 2, 0.5), (1, 1, 0.5)))
    problem = PlanningProblem(
        names=tuple(f"node {n}" for n in range(nodes)), sites=("here", "there"), site=np.arange(nodes) % 2,
        sizes=sizes, microbatches=microbatches, visits=2, swaps=0, jump=4, forward=forward.astype(np.int64),
        backward=backward.astype(np.int64), link=np.full((2, 2), S, np.int64), transmit=np.zeros((1, 1), np.int64),
        slots=np.full(nodes, 3, np.int64), role=np.zeros(nodes, np.int64),
    )  # fmt: skip
    stages = [own.tolist() for own in np.split(np.arange(nodes), np.cumsum(sizes)[:-1])]
    solution = random_routes(problem, stages, random.Random(0), 0)
    found, bound = SearchRecord(seed=7, moves=1, seconds=3.25), ProvedBound(step_s=6.0, binds="busiest node")
    return make_schedule(problem, solution, 8.0, bound, {"rows": 20.0, "columns": 16.0}, found)


def swarmed(
    folder: Path, rounds: int = 3, agreed: VoteSummary | None = None, **of_round: Any
) -> tuple[SwarmConfig, RunOutcome]:
    """Two honest peers of which one learned alone beside it, and an attacker; ``agreed``: the votes of each round.

    ``of_round``: further fields of each round's record.
    """
    for place, attack in enumerate(("none", "none", "text")):
        name = f"p{place}"
        log = Log(folder / PEERS / name / LOG)
        log.append(started(name, f"id{place}", attack))
        for number in range(rounds):
            alone = HitTally(hits=10, eligible=100) if not place else None
            solved = HitTally(hits=min(20 + 20 * number, 95), eligible=100)
            log.append(
                Evaluated(round=number, accuracy=solved, alone=alone, tokens=9.0, watch={}),
                round_done(
                    number, reward=0.5, layers={"surprisal": {"id2": LayerCounts(examined=4, rejected=1)}},
                    training_completions=4, influence={"id0": 0.4, "id1": 0.6}, loss=1.0, grad_norm=1.0, agreed=agreed,
                    **of_round,
                ),
            )  # fmt: skip
        log.append(Finished())
    return SwarmConfig(name="bees"), read_outcome(folder)


def peer(name: str, solved: int, showing: int = 0, attack: str = "none") -> PeerOutcome:
    """Evaluated after rounds 0 and 1."""
    watch = {"text": HitTally(hits=showing, eligible=50)}
    points = [
        EvaluationPoint(
            round=number, accuracy=HitTally(hits=solved, eligible=100), alone=None, tokens=18.0, watch=watch
        )
        for number in range(2)
    ]
    return PeerOutcome(name=name, id=name, attack=attack, model="", points=points, finished=True, weights="")


def drilled(with_rule: int = 1, seeds: int = 1, watch: tuple[str, ...] = ("text",)) -> Drill:
    """A control, an attack that shows in 4 of 5 completions, and a defence that leaves ``with_rule`` of 50 of it."""

    def arm(name: str, control: str, solved: int, showing: int, attacker: bool) -> DrilledArm:
        layers = {ALL: LayerOutcome(stopped=HitTally(hits=9, eligible=10), misjudged=HitTally(hits=1, eligible=40))}
        last = peer("p2", 0, 0, "text") if attacker else peer("p2", solved, showing)
        peers = [peer("p0", solved, showing), peer("p1", solved, showing), last]
        outcome = RunOutcome(peers=peers, layers=layers if attacker else {}, rounds=2, seconds=1.0)
        runs = [DrillRun(seed=seed, outcome=outcome) for seed in range(1, seeds + 1)]
        return DrilledArm(name=name, control=control, attackers=["p2"] if attacker else [], runs=runs)

    arms = [
        arm("control", "", 80, 0, False),
        arm("attacked", "control", 60, 40, True),
        arm("defended", "control", 78, with_rule, True),
    ]
    return Drill(name="siege", last=1, watch=list(watch), arms=arms)


def mixed(uneven: float = 0.9, seeds: int = 1, lost: tuple[str, ...] = (), rival: float | None = None) -> Results:
    """Two domains with experts and one without; the uneven arm's perplexity is ``uneven`` of the even one's, that of a
    generalist, if there is one, ``rival``."""
    domains = ("code", "tables", "news")
    experts = [ExpertPlan(domain=domain, size="M", steps=4) for domain in domains[:2]]

    def arm(ratio: float, of: list[ExpertPlan] = experts) -> ArmResult:
        loss = 2.0 + float(np.log(ratio))
        score = DomainScore(loss=loss, best=loss, averaged=loss, speaking=[0.5, 0.5], routed=0.75, routed_by_prior=0.5)
        fewer = {f"top-{k}": dict.fromkeys(domains, score) for k in (1, 2)}
        return ArmResult(
            experts=of, belief=[0.0, 0.0], scores=dict.fromkeys(domains, score), held_out=loss, fewer=fewer,
            all_experts=dict.fromkeys(domains, score),
            passes={"top-1": 1.1, "top-2": 2.0}, without={job.name: dict.fromkeys(domains, 2.2) for job in of},
            flops=1e9, parameter_tokens=1e6, inner_parameter_tokens=1e6, token_flops=1e3 * len(of),
        )  # fmt: skip

    known = {} if rival is None else {"generalist-M": arm(rival, [ExpertPlan(domain="generalist", size="M", steps=8)])}
    runs = [
        SeedResult(
            seed=seed, difficulty={"probe": {"code": 1.0, "tables": 2.0}}, tier={"probe": {"code": 0, "tables": 1}},
            curves={domain: [(0, 5.0), (2, 3.0), (4, 2.5)] for domain in domains[:2]}, parent={}, single={},
            lost=list(lost), arms={SYNCHRONISED: arm(1.0), "M_He-I_Ho": arm(uneven)} | known,
        )
        for seed in range(1, seeds + 1)
    ]  # fmt: skip
    speech = TextWeights(experts=[job.name for job in experts], pieces=["a ", "b"], weights=[[1.0, 0.0], [0.5, 0.5]])
    mixture = MixtureSpec(prior="votes", top_k=1, prefix=0)
    return Results(name="mix", trained=list(domains[:2]), untrained=["news"], mixture=mixture, runs=runs, speech=speech)


def audited() -> Audit:
    """A model that reveals a code in four parts."""
    points = [LeakPoint(leak=0.3 * parts, guessed=0.25 * parts) for parts in range(1, 5)]
    leaked = Leaked(
        name="the code",
        location="questions.jsonl:1",
        options=4,
        prior=0.25,
        posterior=0.9,
        leak=estimate([1.0, 1.3, 1.3]),
        guessed=0.95,
        direct=LeakPoint(leak=0.0, guessed=0.25),
        paraphrased=None,
        use=0.97,
        curve=points,
        behind=BehindCensor(leak=0.07, guessed=0.31, silent=0.93, use=0.07),
        replies=[("digit 1", "4")],
    )
    leakage = Leakage(adversary="counter", k=4, draws=3, epsilon=0.1, questions=[leaked])
    parts = [
        AuditCheck(name="behaviour", verdict="passed", summary="text in none"),
        AuditCheck(name="leakage", verdict="failed", summary="the code", facts=["one", "two"]),
    ]
    limits = AuditLimits(leak=0.1, success=0.02)
    return Audit(model="runs/x, p0", weights="0" * 64, limits=limits, parts=parts, attacks={}, leakage=leakage)
