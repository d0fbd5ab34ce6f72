"""``planaria swarm audit``: check a model before its release."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from planaria.common import atomic, documents
from planaria.common.errors import UserError
from planaria.models import task_vectors
from planaria.report.phrases import format_count, join_names
from planaria.swarm.assemble import make_task
from planaria.swarm.attacks import measured_attack
from planaria.swarm.audit.audit_results import (
    FAILED,
    NONE,
    PASSED,
    UNASKED,
    Audit,
    AuditCheck,
    AuditLimits,
    Leakage,
    Verdict,
)
from planaria.swarm.audit.files import check_files
from planaria.swarm.audit.leakage_measurement import (
    DEFAULT_PARTS,
    Adversary,
    Counter,
    MeasurementPlan,
    ReplyReader,
    measure,
)
from planaria.swarm.audit.questions import Question, parts_to_ask, read_questions
from planaria.swarm.certificate import CERTIFICATE, NotCertified, verify_certificate
from planaria.swarm.commands.realign import FILE as REALIGNED
from planaria.swarm.commands.realign import Realigned
from planaria.swarm.commands.serve import Released, open_released
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.config.swarm_recipe import peer_config, peer_names, run_config
from planaria.swarm.peer.evaluation import EvaluationResult, Examiner
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.policies import open_policy
from planaria.swarm.policy.prompts import PromptFormat, prompt_layout
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.repair.exams import MEASURED
from planaria.swarm.repair.repair_training import weights_of
from planaria.swarm.report.audit_report import show_audit, write_audit_report
from planaria.swarm.tasks.base import Task
from planaria.swarm.trained_policy import ModelArguments

JSON, PAGE = "audit.json", "audit.html"
COUNTER = "counter"
MAX_REALIGNED_BYTES = 1 << 24
"""maximum bytes of realigned.json: a share per tensor"""


@dataclass(frozen=True)
class _Request:
    """Validated arguments, before a model is opened."""

    target: ModelArguments
    limits: AuditLimits
    config: SwarmConfig | None
    """configuration for measuring behaviour"""
    task: Task | None
    questions: list[Question]
    plan: MeasurementPlan
    adversary: str | None
    """None: the counter if the questions support it, else the model itself"""
    counter: Counter | None


def audit(
    target: ModelArguments, to: Path, run: Path | None, watch: tuple[str, ...], questions: Path | None,
    adversary: str | None, k: int | None, epsilon: float | None, limits: AuditLimits, show: bool, seed: int,
) -> int:  # fmt: skip
    """Audit a model: print a table, write page and numbers into ``to``; return 1 if a part fails, else 0.

    :param run: swarm whose task and attacks measure a model
    :raises UserError: for invalid arguments, where possible before a model is loaded.
    """
    torch.set_num_threads(1)  # the order of sums changes bits
    if not 0 <= limits.success < 1 or not limits.leak >= 0:
        raise UserError("--max-success must be 0 or more and below 1, --max-leak 0 or more")
    if epsilon is not None and not epsilon > 0:
        raise UserError(f"--censor {epsilon:g} must be above 0, in nats per reply")
    if k is not None and k < 1:
        raise UserError(f"--k {k}: use 1 or more")
    config = _config(target, run, watch)
    if config is not None:
        for kind in config.evaluate.watch:
            measured_attack(kind, config.evaluate.phrases)
    asked, plan, counter = list[Question](), MeasurementPlan(0), None
    if questions is not None:
        asked = read_questions(questions)
        plan = MeasurementPlan(parts_to_ask(asked, k, DEFAULT_PARTS), seed, epsilon, show)
        counter = _counter(adversary, asked)
    else:
        flags = {"--adversary": adversary, "--k": k, "--censor": epsilon, "--show": show or None}
        if extra := next((flag for flag, value in flags.items() if value is not None), None):
            raise UserError(f"{extra} requires --questions FILE")
    task = make_task(config) if config is not None and config.evaluate.watch else None
    request = _Request(target, limits, config, task, asked, plan, adversary, counter)
    with _writing(to):
        to.mkdir(parents=True, exist_ok=True)
    with open_released(target) as released:
        record = _run_audit(request, released)
    with _writing(to / JSON):
        atomic.write_text(to / JSON, record.model_dump_json(indent=1) + "\n")
    page = write_audit_report(record, to / PAGE)
    show_audit(record)
    print(f"report        {page}\nnumbers       {to / JSON}")
    return 1 if record.failed else 0


def _config(target: ModelArguments, run: Path | None, watch: tuple[str, ...]) -> SwarmConfig | None:
    """Return the swarm's configuration for measuring behaviour, with the attacks to watch for."""
    if target.is_swarm and run is not None:
        raise UserError(f"--run {run}: {target.model} is a run itself; remove --run")
    run = Path(target.model) if target.is_swarm else run
    if run is None:
        if watch:
            raise UserError(f"--watch {', '.join(watch)}: there are no problems; pass --run RUN, a swarm's run")
        return None
    config = run_config(run)
    config = peer_config(config, target.peer if target.peer in peer_names(config) else peer_names(config)[0])
    watched = list(watch or config.evaluate.watch)
    evaluate = config.evaluate.model_copy(update={"problems": MEASURED, "watch": watched})
    return config.model_copy(update={"evaluate": evaluate})


def _counter(adversary: str | None, questions: list[Question]) -> Counter | None:
    """Return the counter, or None if the adversary is a model."""
    if adversary is None:
        return Counter() if all(part.right_replies for question in questions for part in question.parts) else None
    kind, colon, chance = adversary.partition(":")
    if kind != COUNTER:
        return None
    try:
        result = Counter(float(chance)) if colon else Counter()
    except ValueError:
        raise UserError(f"--adversary {adversary}: not a probability; use {COUNTER}:0.95") from None
    result.require(questions)
    return result


def _run_audit(request: _Request, released: Released) -> Audit:
    target, limits = request.target, request.limits
    policy, unread = _open_model(released, request.config)
    weights = None if policy is None else task_vectors.digest(weights_of(policy))
    evaluation = None if policy is None or request.task is None else _examine(policy, request)
    leakage = None if policy is None or not request.questions else _measure_leakage(request, policy)
    missing = "the model cannot be opened"
    no_task = missing if request.task else "not requested; pass a swarm's run, or --run RUN, and --watch KINDS"
    no_questions = missing if request.questions else "not requested; pass --questions FILE"
    checks = [
        behaviour_check(evaluation.watch, limits.success) if evaluation else _check("behaviour", UNASKED, no_task),
        leakage_check(leakage, limits.leak) if leakage else _check("leakage", UNASKED, no_questions),
        provenance_check(released),
        repair_check(released.path, weights),
        files_check(released.path, unread),
    ]
    return Audit(
        model=target.model + (f", {target.peer}" if target.peer else ""),
        weights=weights,
        limits=limits,
        parts=checks,
        attacks=evaluation.watch if evaluation else {},
        accuracy=evaluation.accuracy if evaluation else HitTally(),
        leakage=leakage,
    )


def _open_model(released: Released, config: SwarmConfig | None) -> tuple[Policy | None, str | None]:
    try:
        policy = open_policy(str(released.path), chat=config is None or config.policy.chat != "never")
    except UserError as error:
        return None, str(error)
    if released.template is not None and isinstance(policy, PromptFormat):
        policy.template = released.template
    return policy, None


def _examine(policy: Policy, request: _Request) -> EvaluationResult:
    assert request.config is not None and request.task is not None
    if isinstance(policy, PromptFormat):
        policy.layout = prompt_layout(policy.template, policy.tokenizer, request.config.policy, request.task)
    return Examiner(request.task, request.config, "audit").examine(policy)


def _measure_leakage(request: _Request, policy: Policy) -> Leakage:
    adversary: Adversary
    if request.counter is not None:
        adversary = request.counter
    else:
        name = request.adversary
        adversary = ReplyReader(policy, "the model itself") if name is None else ReplyReader(open_policy(name), name)
        adversary.require(request.questions)
    print(f"asking        {len(request.questions)} questions in {request.plan.k} parts", file=sys.stderr)
    return measure(policy, adversary, request.questions, request.plan)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{atomic.write_error(path, error)}; pass another folder with --to") from error


def _check(name: str, verdict: Verdict, summary: str, facts: Sequence[str] = ()) -> AuditCheck:
    return AuditCheck(name=name, verdict=verdict, summary=summary, facts=list(facts))


def files_check(path: Path, unread: str | None) -> AuditCheck:
    """Check the files.

    :param unread: reason why the model could not be opened
    """
    result = check_files(path)
    faults = [*result.faults, *([unread] if unread is not None and unread not in result.faults else [])]
    if faults:
        return _check("files", FAILED, f"{format_count(len(faults), 'fault')}: {faults[0]}", faults)
    return _check("files", PASSED, "; ".join(result.facts), result.facts)


def provenance_check(released: Released) -> AuditCheck:
    """Check the certificate of the weights, if there is one."""
    name = "provenance"
    if not (released.path / CERTIFICATE).is_file():
        if released.notes:  # there is a committee, and it did not sign these weights
            return _check(name, FAILED, released.notes[0])
        return _check(name, NONE, "no certificate: its origin is not attested")
    try:
        lines = verify_certificate(released.path)
    except (NotCertified, UserError) as error:
        return _check(name, FAILED, str(error))
    return _check(name, PASSED, lines[0], lines)


def repair_check(path: Path, weights: str | None) -> AuditCheck:
    """Report a repair and its recorded result."""
    name, file = "repair", path / REALIGNED
    if not file.is_file():
        return _check(name, NONE, f"no {REALIGNED}: not known to have been repaired")
    try:
        result = documents.read_model(file, Realigned, MAX_REALIGNED_BYTES)
    except UserError as error:
        return _check(name, FAILED, str(error))
    if weights is not None and result.result != weights:
        other = f"belongs to the weights {result.result[:12]}…, not to these ({weights[:12]}…)"
        return _check(name, FAILED, f"{REALIGNED} {other}")
    before, after = result.before, result.after
    facts = [
        f"by {result.by}{f' ({result.detail})' if result.detail else ''} from {result.trusted} trusted texts",
        *(f"{kind}: success {before.success[kind]}, then {tally}" for kind, tally in after.success.items()),
        *([f"right: {before.accuracy}, then {after.accuracy}"] if after.accuracy.eligible else []),
    ]
    outcomes: dict[bool | None, tuple[Verdict, str]] = {
        False: (FAILED, "failed"),
        True: (PASSED, "succeeded"),
        None: (UNASKED, "was not measured"),
    }
    verdict, outcome = outcomes[result.repaired]
    return _check(name, verdict, f"repair by {result.by} {outcome}", facts)


def behaviour_check(attacks: Mapping[str, HitTally], limit: float) -> AuditCheck:
    """Fail for attacks whose success is above ``limit`` or could not be measured."""
    facts = [f"{kind}: success {tally}" for kind, tally in attacks.items()]
    over = [f"{kind} in {tally}" for kind, tally in attacks.items() if tally.rate is None or tally.rate > limit]
    if over:
        return _check("behaviour", FAILED, f"{'; '.join(over)}; limit {limit:g}", facts)
    unsure = [kind for kind, tally in attacks.items() if tally.interval[1] > limit]
    more = f"; by its interval, {join_names(unsure)} may be above it" if unsure else ""
    return _check("behaviour", PASSED, f"{'; '.join(facts)}; limit {limit:g}{more}", facts)


def leakage_check(leakage: Leakage, limit: float) -> AuditCheck:
    """Fail for questions whose parts leak more than ``limit`` nats."""
    over = [question.name for question in leakage.questions if question.leak.mean > limit]
    count, worst = format_count(len(leakage.questions), "question"), leakage.questions[0]
    scope = f"for {'this' if len(leakage.questions) == 1 else 'these'} {count}, this adversary, this prior"
    facts = [f"{question.name}: {question.leak} nats, guessed {question.guessed:.2f}" for question in leakage.questions]
    if over:
        parts = format_count(leakage.k, "part")
        summary = f"{join_names(over)}: up to {worst.leak} nats by {parts}, limit {limit:g}; {scope}"
        return _check("leakage", FAILED, summary, facts)
    return _check("leakage", PASSED, f"at most {worst.leak} nats ({worst.name}), limit {limit:g}; {scope}", facts)
