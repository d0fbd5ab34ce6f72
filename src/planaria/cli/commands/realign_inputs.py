"""What `planaria realign` is given, opened: models, their parents, and what to learn from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from planaria.common.errors import UserError
from planaria.lab.experts import fused
from planaria.models import fusing
from planaria.swarm.learned import Learned, learned, trusted
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.policies import open_policy
from planaria.swarm.records.lines import PEERS
from planaria.swarm.repair.exams import TextExam
from planaria.swarm.repair.models import Models
from planaria.swarm.repair.of_task import case_of
from planaria.swarm.repair.texts import Texts, read_benign, read_pairs, read_trusted, split
from planaria.swarm.repair.training import Plan, weights_of
from planaria.swarm.repair.ways import Case


@dataclass(frozen=True)
class Given:
    """What the user named."""

    model: str
    """a swarm's run, or a model"""
    peer: str | None = None
    round: int | None = None
    safe: str | None = None
    trusted: Path | None = None
    pairs: Path | None = None
    benign: Path | None = None
    watch: tuple[str, ...] = ()

    @property
    def files(self) -> bool:
        return self.trusted is not None or self.pairs is not None

    @property
    def is_swarm(self) -> bool:
        return (Path(self.model) / PEERS).is_dir()


@dataclass(frozen=True)
class Found:
    """The models that were named, and where the parts of fused ones lie."""

    models: Models
    parent: str
    """where the parent came from; empty: there is none, and none is needed"""
    parts: tuple[str, ...] = ()
    peer: Learned | None = None


def find(given: Given, needs_parent: bool = True) -> Found:
    """Open the model and its parent.

    :raises UserError: when something is missing, they are not of one shape or tokenizer, or fused models have changed.
    """
    if given.is_swarm:
        found = _of_swarm(given)
    elif given.peer is not None or given.round is not None:
        raise UserError(f"{given.model}: is no run of a swarm; leave out --peer and --round")
    else:
        found = _of_folder(given, needs_parent)
    return found


def case(given: Given, found: Found, plan: Plan) -> Case:
    """What there is to learn from, and how it is measured.

    :raises UserError: when there is nothing to learn from, or nobody to judge it.
    """
    if given.benign is not None and not given.files:
        raise UserError(f"--benign {given.benign}: goes with --pairs FILE or --trusted FILE")
    if given.files:
        if given.watch:
            raise UserError(
                f"--watch {', '.join(given.watch)}: goes with a run's own task; leave out --pairs, --trusted"
            )
        return _of_files(given, found.models, plan)
    if found.peer is None:
        raise UserError(f"{given.model}: what can be trusted? give --pairs FILE or --trusted FILE")
    config = found.peer.config
    return case_of(config, found.peer.task, found.models, given.watch or tuple(config.evaluate.watch), plan)


def _of_swarm(given: Given) -> Found:
    if given.peer is None:
        raise UserError(f"{given.model}: which peer's model? give --peer, such as --peer p0")
    run = Path(given.model)
    peer = learned(run, given.peer, given.round)
    if given.safe is not None:
        return Found(Models(open_policy(given.safe), peer.policy), given.safe, peer=peer)
    before = trusted(peer.config, run, given.peer)
    return Found(Models(before.policy, peer.policy), f"{run}, {given.peer} after round {before.round}", peer=peer)


def _of_folder(given: Given, needs_parent: bool) -> Found:
    known, tuned = fused.read_whole(Path(given.model)), open_policy(given.model)
    if known is not None:
        return _of_fused(given, known, tuned)
    if given.safe is None and needs_parent:
        raise UserError(f"{given.model}: which model does it descend from? give --safe MODEL, or repair it --by tune")
    if given.safe is None:
        return Found(Models(tuned, tuned), "")
    return Found(Models(open_policy(given.safe), tuned), given.safe)


def _of_fused(given: Given, known: fused.Fused, tuned: Policy) -> Found:
    place = given.safe or known.parent.place
    safe, experts = open_policy(place), [open_policy(part.place) for part in known.parts]
    parent = weights_of(safe)
    for policy, part in zip((safe, *experts), (known.parent, *known.parts), strict=True):
        if fusing.digest(weights_of(policy)) != part.sha256:
            raise UserError(f"{part.place}: is not the model that {given.model} was made of; bring that back")
    contributions = fused.contributions(known, parent, [weights_of(one) for one in experts])
    if fusing.digest(fusing.fused(parent, contributions)) != fusing.digest(weights_of(tuned)):
        raise UserError(
            f"{given.model}: has changed since it was put together; make it anew with `planaria experts fuse`"
        )
    domains = {part.domain or part.name: one for part, one in zip(known.parts, experts, strict=True)}
    return Found(Models(safe, tuned, contributions, domains), place, tuple(part.place for part in known.parts))


def _of_files(given: Given, models: Models, plan: Plan) -> Case:
    policy = models.tuned
    told = [] if given.trusted is None else read_trusted(given.trusted, policy)
    pairs = [] if given.pairs is None else read_pairs(given.pairs, policy)
    benign = [] if given.benign is None else read_benign(given.benign, policy)
    (known, measured), (stay, read) = split(len(pairs)), split(len(benign))
    learnt = [pairs[n] for n in known]
    trusted = [*told, *(pair.chosen for pair in learnt)]
    exam = TextExam([pairs[n] for n in measured], [benign[n].text for n in read], learnt, trusted)
    return Case(models, Texts(trusted, [benign[n] for n in stay]), plan, exam)
