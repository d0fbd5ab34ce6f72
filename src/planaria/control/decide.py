"""``decide(state)``: what is to be done next, or nothing until something happens. Pure.

Every decision changes the state it was made from (through ``apply``), so asking again never repeats one.
"""

from __future__ import annotations

from planaria import decisions as d
from planaria.control.state import RunState
from planaria.recovery import recovery

MAX_STILLBORN = 3
MAX_ATTEMPTS = 20


def decide(state: RunState) -> d.Decision | None:
    """The next decision in ``state``; None when there is nothing to do but wait."""
    if state.phase == "over":
        return None
    if state.failed:
        return d.Finish(outcome="failed", reason=state.failed)
    if state.attempts >= MAX_ATTEMPTS and not state.cannot and state.phase not in ("commit", "save"):
        reason = f"{state.attempts} generations in a row did not get step {state.step} committed"
        return d.Cannot(lost=[], reason=reason)
    if state.phase == "run":
        return d.Commit(generation=state.generation, step=state.step) if not state.waiting else _staff(state)
    if state.phase == "save" and not state.waiting:
        return _seal(state)
    if state.phase != "idle":
        return None
    if state.cannot:
        return _wind_up(state)
    return _form(state) if _is_broken(state) else _proceed(state)


def _is_broken(state: RunState) -> bool:
    """Does a stage lack a worker or a state, or a pair of them an edge? What is being skipped may wait for a spare."""
    stateless = (state.lost | state.origins.keys()) & state.holders.keys()
    vacant = set(state.vacant)
    unfilled = vacant - state.skipped or (vacant and state.with_status("spare"))
    return bool(unfilled or stateless or state.pairs_of(state.holders) - state.links.keys())


def _proceed(state: RunState) -> d.Decision | None:
    """The replica is idle: validate, save, train on, or finish, in this order. What it skips, it does not save."""
    settings, step = state.settings, state.step
    done = step >= settings.steps
    if state.skipped:
        if not done and not state.stopping:
            return d.RunStep(generation=state.generation, step=step)
        return _staff(state) if state.stillborn < MAX_STILLBORN else _stillborn(state)
    evaluate = settings.eval_every and (done or step % settings.eval_every == 0)
    if evaluate and step > state.evaluated and not state.stopping:
        return d.RunStep(generation=state.generation, step=step, mode="evaluate")
    save = done or state.stopping or (state.save_every and step and step % state.save_every == 0)
    if save and state.saved != step:
        return d.Save(generation=state.generation, step=step)
    if done:
        return d.Finish(outcome="finished")
    if state.stopping:
        return d.Finish(outcome="stopped", reason=state.stopping)
    return d.RunStep(generation=state.generation, step=step)


def _form(state: RunState) -> d.Decision | None:
    """A new generation: fill vacant stages from spares, give every stage a state, replace edges that are gone."""
    plan = recovery(state.settings.recovery, state.settings.stages).plan(state.lost, state.ages)
    if plan.reason:
        return d.Cannot(lost=sorted(state.lost), reason=plan.reason)
    spares = state.with_status("spare")
    if len(spares) < len(state.vacant) and (plan.rollback or not _may_skip(state)):
        return _staff(state) if state.stillborn < MAX_STILLBORN else _stillborn(state)
    holders = {**state.holders, **dict(zip(state.vacant, spares, strict=False))}
    if plan.rollback:
        step, origins = state.last_durable
        return _formation(state, holders, {stage: origins[stage] for stage in holders}, step, "rolled back")
    sources: dict[int, d.Source] = {stage: state.origins.get(stage, d.Keep()) for stage in holders}
    for stage, (by, donors) in plan.rebuilt.items():
        if stage in holders:
            sources[stage] = d.Rebuild(by=by, donors=list(donors))
    outcome = "skipping" if len(holders) <= state.settings.stages else _outcome(state)
    return _formation(state, holders, sources, state.step, outcome)


def _may_skip(state: RunState) -> bool:
    """May training go on without the vacant stages until there are workers for them?

    Not while the state of one can be had exactly: a stage that is skipped is lost, and never anyone's donor.
    """
    blocks_left = set(state.holders) - {0}
    wanted = state.settings.recovery.meanwhile == "skip" and 0 in state.holders
    return wanted and state.formed >= 0 and bool(blocks_left) and state.lost >= set(state.vacant)


def _outcome(state: RunState) -> str:
    if state.formed < 0:
        return "started"
    return "recovered" if state.lost or state.vacant or state.origins else "relinked"


def _formation(
    state: RunState, holders: dict[int, str], sources: dict[int, d.Source], step: int, outcome: str
) -> d.Form:
    generation = state.generation + 1
    kept = {pair: link for pair, link in state.links.items() if not set(pair) & set(state.vacant)}
    links = [
        d.Link(low=a, high=b, id=kept.get((a, b), f"g{generation}:{a}-{b}")) for a, b in sorted(state.pairs_of(holders))
    ]
    members = [d.Member(stage=s, worker=holders[s], source=sources[s]) for s in sorted(holders)]
    return d.Form(generation=generation, step=step, outcome=outcome, members=members, links=links)  # type: ignore[arg-type]


def _stillborn(state: RunState) -> d.Cannot | d.Finish:
    """A stage lacks a worker and none can be started: save what there is, if there is anything."""
    reason = f"{state.stillborn} workers in a row died before they were ready"
    if state.formed < 0:
        return d.Finish(outcome="failed", reason=reason)
    return d.Cannot(lost=list(state.vacant), reason=reason)


def _staff(state: RunState) -> d.Spawn | None:
    """Start a worker if stages lack one, or if spares do and the run moves: starting one costs the others CPU time.

    Spares are a convenience: where they die before they are ready, the run goes on without.
    """
    short = len(state.vacant) - len(state.with_status("spare")) - len(state.with_status("starting"))
    moving = state.formed < 0 or state.step > state.formed
    wanted = state.settings.spares if moving and state.stillborn < MAX_STILLBORN else 0
    if short + wanted <= 0:
        return None
    dead = state.with_status("dead")
    if dead:
        return d.Spawn(worker=dead[0], incarnation=state.workers[dead[0]].incarnation + 1)
    return d.Spawn(worker=f"w{len(state.workers)}", incarnation=1)


def _seal(state: RunState) -> d.Seal | d.Finish:
    """All stages that have a state are on disk; a checkpoint without the lost ones is marked partial."""
    stages = [s for s in sorted(state.holders) if s not in state.lost and s not in state.origins]
    if not stages:  # the last survivor died while it was being saved
        return d.Finish(outcome="cannot", reason=state.cannot)
    partial = len(stages) <= state.settings.stages
    return d.Seal(step=state.step, folder=folder_name(state.step, partial), stages=stages, partial=partial)


def _wind_up(state: RunState) -> d.Decision | None:
    """After *cannot*: drop what is under way, save the survivors, leave."""
    survivors = [s for s in state.holders if s not in state.lost and s not in state.origins]
    if state.saved != state.step and survivors:
        return d.Save(generation=state.generation, step=state.step)
    return d.Finish(outcome="cannot", reason=state.cannot)


def folder_name(step: int, partial: bool = False) -> str:
    """Name of the checkpoint of ``step`` inside the run's folder of checkpoints."""
    return f"step-{step:08d}" + (".partial" if partial else "")
