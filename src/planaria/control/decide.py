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
    """Does a node lack a worker or a state, or a pair of them an edge? What is being skipped may wait for a spare."""
    stateless = (state.lost | state.origins.keys()) & state.holders.keys()
    vacant = set(state.vacant)
    unfilled = vacant - state.skipped or (vacant and state.with_status("spare"))
    return bool(unfilled or stateless or state.pairs_of(state.holders) - state.links.keys())


def _proceed(state: RunState) -> d.Decision | None:
    """The replica is idle: validate, save, train on, or finish, in this order. What it skips, it does not save."""
    settings, step = state.settings, state.step
    done = step >= settings.steps
    if len(state.stateful.stages) <= settings.stages:
        if not done and not state.stopping:
            return d.RunStep(generation=state.generation, step=step)
        return _wait(state)
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
    """A new generation: fill vacant nodes from spares, give every node a state, replace edges that are gone."""
    of, alive = state.arrangement.stage, state.stateful
    # Nodes of one stage hold the same: where one has yet to begin from seed or disk, so does another that was lost.
    begins = {of[node]: source for node, source in state.origins.items() if node in state.holders}
    # A stage is lost with the last node that had its state; until then, its nodes copy one another.
    gone = frozenset(of[node] for node in state.lost) - set(alive.stages) - begins.keys()
    plan = recovery(state.settings.recovery, state.settings.stages).plan(gone, state.ages)
    if plan.reason:
        return d.Cannot(lost=sorted(gone), reason=plan.reason)
    spares = state.with_status("spare")
    if len(spares) < len(state.vacant) and (plan.rollback or not _may_skip(state)):
        return _wait(state)
    holders = {**state.holders, **dict(zip(state.vacant, spares, strict=False))}
    if plan.rollback:
        step, origins = state.last_durable
        return _formation(state, holders, {node: origins[node] for node in holders}, step, "rolled back")
    sources: dict[int, d.Source] = {node: state.origins.get(node, d.Keep()) for node in holders}
    for node in state.lost & holders.keys():
        if not alive.nodes(of[node]) and of[node] in begins:
            sources[node] = begins[of[node]]
            continue
        by, donors = plan.rebuilt.get(of[node], (d.PEER, (of[node],)))
        sources[node] = d.Rebuild(by=by, donors=[(alive.nodes(s) or state.held.nodes(s))[0] for s in donors])
    outcome = "skipping" if len(holders) < len(of) else _outcome(state)
    return _formation(state, holders, sources, state.step, outcome)


def _may_skip(state: RunState) -> bool:
    """May training go on without the vacant nodes until there are workers for them?

    Not while the state of one can be had exactly, if a worker is to come: a stage that is skipped is lost, and never
    anyone's donor. A schedule leaves out nodes but no stage.
    """
    if state.settings.recovery.meanwhile != "skip" or state.formed < 0:
        return False
    if not state.lost >= set(state.vacant) and not (_final(state) and state.settings.arrangement):
        return False
    stages = state.held.stages
    return len(stages) > state.settings.stages if state.settings.arrangement else 0 in stages and len(stages) > 1


def _outcome(state: RunState) -> str:
    if state.formed < 0:
        return "started"
    return "recovered" if state.lost or state.vacant or state.origins else "relinked"


def _formation(
    state: RunState, holders: dict[int, str], sources: dict[int, d.Source], step: int, outcome: str
) -> d.Decision:
    """The formation of these nodes; before it, a plan for them if there is none."""
    routes = state.routes_over(holders)
    if routes is None:
        return d.Replan(nodes=sorted(holders))
    generation, stage = state.generation + 1, state.arrangement.stage
    kept = {pair: link for pair, link in state.links.items() if not set(pair) & set(state.vacant)}
    return d.Form(
        generation=generation,
        step=step,
        outcome=outcome,  # type: ignore[arg-type]
        members=[d.Member(node=n, stage=stage[n], worker=holders[n], source=sources[n]) for n in sorted(holders)],
        links=[
            d.Link(low=a, high=b, id=kept.get((a, b), f"g{generation}:{a}-{b}"))
            for a, b in sorted(state.pairs_of(holders))
        ],
        routes=routes if state.settings.arrangement else [],
    )


def _wait(state: RunState) -> d.Decision | None:
    """Nothing goes on until there is a worker more; if there will be none, the run is over."""
    if state.stillborn >= MAX_STILLBORN:
        return _without_worker(state, f"{state.stillborn} workers in a row died before they were ready")
    if _final(state) and not state.with_status("starting"):
        where = "node" if state.settings.arrangement else "stage"
        named = ", ".join(map(str, state.vacant))
        return _without_worker(state, f"no worker is left for {where} {named}; fleet.replace = false starts no other")
    return _staff(state)


def _without_worker(state: RunState, reason: str) -> d.Cannot | d.Finish:
    """A node lacks a worker and none can be started: save what there is, if there is anything."""
    if state.formed < 0:
        return d.Finish(outcome="failed", reason=reason)
    return d.Cannot(lost=sorted(set(state.arrangement.stages) - set(state.held.stages)), reason=reason)


def _final(state: RunState) -> bool:
    """Are the workers that there are all that there will be?"""
    return not state.settings.replace and state.formed >= 0


def _staff(state: RunState) -> d.Spawn | None:
    """Start a worker if nodes lack one, or if spares do and the run moves: starting one costs the others CPU time.

    Spares are a convenience: where they die before they are ready, the run goes on without.
    """
    if _final(state):
        return None
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
    stages = list(state.stateful.stages)
    if not stages:  # the last survivor died while it was being saved
        return d.Finish(outcome="cannot", reason=state.cannot)
    partial = len(stages) <= state.settings.stages
    return d.Seal(step=state.step, folder=folder_name(state.step, partial), stages=stages, partial=partial)


def _wind_up(state: RunState) -> d.Decision | None:
    """After *cannot*: drop what is under way, save the survivors, leave."""
    if state.saved != state.step and state.stateful.stages:
        return d.Save(generation=state.generation, step=state.step)
    return d.Finish(outcome="cannot", reason=state.cannot)


def folder_name(step: int, partial: bool = False) -> str:
    """Name of the checkpoint of ``step`` inside the run's folder of checkpoints."""
    return f"step-{step:08d}" + (".partial" if partial else "")
