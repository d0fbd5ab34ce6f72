"""A run's log, folded into the live page's state and its frames; live and finished runs work the same way.

The state is JSON of schema ``frames.SCHEMA``:

    run         its name, shape and settings
    step        committed steps of the run
    loss, validation                  the newest values
    replicas    number → phase, own step, generation, routes of its microbatches, stages that have finished the step
    nodes       number → replica, stage, worker, whether it holds its state or waits for it, and from which nodes
    workers     name → status (``control/state/roster.py``), incarnation, pid, node, machine, memory, faults
    machines    machines that have joined
    links       "low-high" → open, opening or broken, and bytes sent over it
    rounds      "r.r" → replicas that meet
    recoveries  replica → its latest recovery, with its phases in seconds
    slow        "class nodes" → slow part: nodes, step, evidence, and the action against it
    caption     the current caption
    over        outcome of the run; empty before its end

The log does not record where microbatches are within a step; the page animates them along ``routes``.
"""

from __future__ import annotations

from collections.abc import Callable

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import LogItem
from planaria.control.log.run_record import StepMetric, ValidationMetric
from planaria.exchange.coded.coded_facts import CloseRound, ResultsSent, RoundLate
from planaria.pipeline.routing import ROUTINGS, routes, routes_vary, skip_stages
from planaria.report.live_page.captions import Captions
from planaria.report.live_page.frames import SCHEMA, Json, StateChange, apply_patch, difference
from planaria.report.live_page.page_state import PageState
from planaria.report.observe.tally import RunTally, SlowVerdict, SlowVerdicts
from planaria.report.run.event_lines import Narrator
from planaria.report.run.naming import Naming
from planaria.report.run.recovery_timing import RecoveryTiming
from planaria.report.run.slowness_lines import slowness_line
from planaria.report.worker_assignments import WorkerAssignments

PHASES: dict[type, str] = {
    d.RunStep: "step", d.Commit: "commit", d.Form: "link", d.Save: "save", d.Replan: "replan", d.Disband: "vacated",
    d.ReplicaRestarted: "wait", d.Unrecoverable: "cannot",
}  # fmt: skip
"""decision about a replica → phase that it starts"""
MAX_RECOVERY_CHECKS = 200
"""maximum routine facts after the last non-routine one within which a recovery can complete"""
REPLACED_PARTS = ("nodes", "workers", "machines", "links", "replicas", "rounds", "recoveries", "run", "slow")
"""parts of the state that a non-routine frame replaces as a whole"""
INVISIBLE_FACTS: set[type] = {
    e.StageCommitted, e.StageCopied, e.StageSaved, e.UpdateReceived, e.UpdatesWeighted, e.MessageCompressed,
    e.RoundApplied, ResultsSent, RoundLate, CloseRound, e.RoundWaitExpired, e.GraceExpired, d.DrawGroups,
    d.OpenPrefetchLinks, e.RetryDue, e.IntervalChosen, d.Discard,
}  # fmt: skip
"""facts that change nothing visible"""


class LogFold:
    """Folds a run's log in order; ``state`` is the page's current state."""

    def __init__(self, config: RunConfig) -> None:
        self.state: Json = {"schema": SCHEMA, "run": _run_summary(config)}
        self._config = config
        self._narrator = Narrator()
        self.members = self._narrator.members
        self._page_state = PageState(self.members)
        self._captions = Captions(self.members, config.pipeline.microbatches)
        self.tally = RunTally()
        self._routes = MicrobatchRoutes(config, self.members)
        self._recovery_checks = 0
        """remaining routine facts that can complete a recovery"""
        self._number = 0
        self._origin = 0.0
        """clock time at which this part of the run started"""
        self._end = 0.0
        """seconds of all earlier parts"""
        self.latest = 0.0
        """clock time of the newest fact"""

    def apply(self, t: float, entry: LogItem) -> StateChange | None:
        """Return the frame of a fact at clock time ``t``, or None if it changes nothing visible."""
        if isinstance(entry, e.RunStarted):
            self._end = self.seconds(self.latest) if self._number else 0.0
            self._origin = t
        self.latest = max(self.latest, t) if not isinstance(entry, e.RunStarted) else t
        if isinstance(entry, StepMetric | ValidationMetric):
            self.tally.apply_metric(entry)
            if isinstance(entry, StepMetric):
                return self._frame(t, {"loss": _loss_summary(entry)})
            return self._frame(t, {"validation": {"step": entry.step, "value": _finite(entry.val_loss)}})
        if isinstance(entry, e.WorkReport):
            return self._apply_work_report(t, entry)
        return self._apply_fact(t, entry)

    def seconds(self, t: float) -> float:
        """Convert clock time to seconds of the run, without the time between its parts."""
        return self._end + max(0.0, t - self._origin)

    def _apply_fact(self, t: float, fact: e.Event | d.Decision) -> StateChange | None:
        holders = dict(self.members.holders)
        line = self._narrator.describe(t, fact)
        vacated = [node for node, worker in holders.items() if self.members.holders.get(node) != worker]
        self.tally.apply(t, fact)
        self._page_state.apply(fact)
        caption = self._captions.caption(fact, vacated, line)
        patch: Json = {"caption": caption._asdict()} if caption else {}
        patch |= {"step": self.members.progress}
        if isinstance(fact, d.RunStep | d.Commit | e.StageReady):
            return self._frame(t, patch | self._step_changes(t, fact))
        if isinstance(fact, d.SlowPartFound | d.Cleared | d.HandOverSlowStage | d.Reroute | e.RunStarted):
            patch |= {"slow": slow_summary(self.tally.verdicts, self.members.naming)}
        if type(fact) in INVISIBLE_FACTS:
            return None
        after = self._full_changes(t, fact) | patch
        story = {"step": line.step, "tone": line.tone, "text": line.text} if line else None
        return self._frame(t, after, story, routine=False)

    def _apply_work_report(self, t: float, worked: e.WorkReport) -> StateChange | None:
        self.tally.apply_work_report(worked)
        self._page_state.apply(worked)
        patch: Json = {"links": self._page_state.links()}
        if worked.worker in self.state.get("workers", {}):
            patch["workers"] = {worked.worker: self._page_state.peak(worked.worker)}
        return self._frame(t, patch | self._recovery_changes())

    def _step_changes(self, t: float, fact: d.RunStep | d.Commit | e.StageReady) -> Json:
        """Return the changes by a step's routine facts, which can complete a recovery."""
        if isinstance(fact, e.StageReady):
            node = self.members.node_of.get(fact.worker)
            replica = fact.replica if node is None else self.members.replica(node)
            before = self.state.get("replicas", {}).get(str(replica), {})
            if node is None or fact.generation != self.members.generation.get(replica) or "done" not in before:
                return {}
            return {"replicas": {str(replica): {"done": sorted({*before["done"], node})}}}
        phase = "evaluate" if isinstance(fact, d.RunStep) and fact.mode == "evaluate" else PHASES[type(fact)]
        about: Json = {"phase": phase, "since": round(self.seconds(t), 4), "step": fact.step}
        if isinstance(fact, d.RunStep):
            about |= {"done": [], "routes": self._routes.of_step(fact)}
        return {"replicas": {str(fact.replica): about}} | self._recovery_changes()

    def _full_changes(self, t: float, fact: e.Event | d.Decision) -> Json:
        """Return all parts of the state that a non-routine fact may change."""
        after = self._page_state.snapshot() | {"replicas": self._replicas(t, fact), "rounds": self._open_rounds(fact)}
        after |= self._recovery_changes(routine=False)
        if isinstance(fact, e.RunStarted):
            shape = {"steps": fact.steps, "stages": fact.stages, "replicas": fact.replicas}
            about_run = self.state["run"] | shape | {"first_step": fact.first_step}
            after |= {"over": "", "run": about_run, "recoveries": {}}
        if isinstance(fact, d.Finish):
            after |= {"over": fact.outcome}
        if isinstance(fact, d.Seal):
            after |= {"saved": fact.step}
        return after

    def _replicas(self, t: float, fact: e.Event | d.Decision) -> Json:
        members, replicas_before = self.members, self.state.get("replicas", {})
        if isinstance(fact, e.RunStarted):
            replicas_before = {}
        known = {
            str(n): dict(replicas_before.get(str(n), {"phase": "wait", "step": members.own_step(n)}))
            for n in members.live
        }
        phase = PHASES.get(type(fact), "broken")
        for number in _replicas_with_changed_phase(fact, self.state.get("nodes", {})):
            if (about := known.get(str(number))) is not None:
                about |= {"phase": phase, "since": round(self.seconds(t), 4), "done": []}
        for name, about in known.items():
            about["generation"] = members.generation.get(int(name), 0)
            if isinstance(fact, d.Form) and name == str(fact.replica):
                about["step"] = fact.step
        return known

    def _open_rounds(self, fact: e.Event | d.Decision) -> Json:
        """Return the current rounds by their members."""
        rounds: Json = dict(self.state.get("rounds", {})) if not isinstance(fact, e.RunStarted) else {}
        if isinstance(fact, d.BeginRound):
            rounds[_members(fact.members)] = {"round": fact.round, "members": fact.members}
        elif isinstance(fact, d.Settle | d.Disband | d.Form):
            lost = {*fact.members} if isinstance(fact, d.Settle) else {fact.replica}
            rounds = {name: meeting for name, meeting in rounds.items() if not lost & {*meeting["members"]}}
        return rounds

    def _recovery_changes(self, routine: bool = True) -> Json:
        """Return the recoveries; nothing if a routine fact cannot change one."""
        if routine and not self._recovery_checks:
            return {}
        recoveries = {
            str(n): recovery_summary(timing, self.seconds)
            for n, timing in self.tally.latest.items()
            if timing.outcome != "handed over" or timing.nodes
        }
        self._recovery_checks = self._recovery_checks - 1 if routine else MAX_RECOVERY_CHECKS
        if all("ended" in recovery for recovery in recoveries.values()):
            self._recovery_checks = 0
        return {"recoveries": recoveries}

    def _frame(self, t: float, updates: Json, line: Json | None = None, routine: bool = True) -> StateChange | None:
        """Return the frame that updates these parts of the state."""
        replaced = () if routine else REPLACED_PARTS
        before = {name: self.state.get(name, {}) for name in updates}
        after = {
            name: apply_patch(before[name], value) if isinstance(value, dict) and name not in replaced else value
            for name, value in updates.items()
        }
        patch = difference(before, after) | {n: v for n, v in after.items() if n not in self.state}
        if not patch and line is None:
            return None
        self.state = self.state | after
        self._number += 1
        return StateChange(self._number, self.seconds(t), patch, line, routine)


def _replicas_with_changed_phase(fact: e.Event | d.Decision, nodes_before: Json) -> list[int]:
    """Return the replicas whose phase a fact changes; ``nodes_before``: the shown nodes before the fact."""
    if isinstance(fact, d.Form | d.Save | d.Replan | d.Disband | d.ReplicaRestarted | d.Unrecoverable):
        return [fact.replica]
    if isinstance(fact, e.WorkerLost):
        return [node["replica"] for node in nodes_before.values() if node.get("worker") == fact.worker]
    return []


def _members(numbers: list[int]) -> str:
    return ".".join(map(str, numbers))


def _loss_summary(metric: StepMetric) -> Json:
    each = {str(replica): _finite(loss) for replica, loss in metric.losses.items()}
    point: Json = {"step": metric.step, "value": _finite(metric.loss), "tokens_per_s": round(metric.tokens_per_s, 1)}
    return point | ({"each": each} if each else {})


def _finite(value: float) -> float | str:
    """Return infinities as text, since JSON has none."""
    return round(value, 5) if abs(value) < float("inf") else str(value)


def _run_summary(config: RunConfig) -> Json:
    return {
        "name": config.name,
        "engine": config.engine,
        "steps": config.train.steps,
        "stages": config.pipeline.stages,
        "microbatches": config.pipeline.microbatches,
        "replicas": config.exchange.replicas,
        "exchange": config.exchange.kind,
        "strategy": config.recovery.strategy,
    }


def slow_summary(verdicts: SlowVerdicts, naming: Naming) -> Json:
    """Return slow parts by class and nodes, earliest first, each with the log's sentence about it."""
    by_step = sorted(verdicts.current.items(), key=lambda item: item[1].blamed.step)
    return {
        f"{fault} {'-'.join(map(str, nodes))}": _verdict_summary(verdict, naming) for (fault, nodes), verdict in by_step
    }


def _verdict_summary(verdict: SlowVerdict, naming: Naming) -> Json:
    blamed = verdict.blamed
    label, _, evidence = slowness_line(blamed, naming).partition(": ")
    summary: Json = {
        "class": blamed.fault,
        "replica": blamed.replica,
        "nodes": blamed.nodes,
        "workers": blamed.workers,
        "step": blamed.step,
        "what": label,
        "evidence": evidence,
    }
    return summary | ({} if verdict.action is None else {"action": slowness_line(verdict.action, naming)})


class MicrobatchRoutes:
    """Finds the nodes that each microbatch visits, from the recipe and the log; ``members`` has the live nodes."""

    def __init__(self, config: RunConfig, members: WorkerAssignments) -> None:
        self._config, self._members = config, members
        self._shipped = config.routing.kind in ROUTINGS.shipped
        self._fixed = routes(config, 0) if self._shipped and not routes_vary(config) else None
        """routes over stages, if they are the same in every step"""

    def of_step(self, run: d.RunStep) -> list[list[int]]:
        """Return a route per microbatch of the step, from its first node and back to it.

        The log's routes are used for custom routings, since a log must not choose what is imported, and if the recipe's
        number of stages differs from that of this part of the run.
        """
        started, config = self._members.started, self._config
        if started is None:
            return []
        column = self._column(run.replica)
        computable = self._shipped and config.pipeline.stages == started.stages
        if started.arrangement or not computable or run.mode == "evaluate":
            logged = started.routes_of(run.replica) if run.mode == "train" or started.arrangement else []
            return logged or [column + column[:1]]
        lost = {stage for stage, node in enumerate(column) if node not in self._members.holders} - {0}
        skipped = lost if len(lost) < len(column) - 1 and self._members.holders else set()
        return [
            [column[stage] for stage in route]
            for route in skip_stages(self._fixed or routes(config, run.step), skipped)
        ]

    def _column(self, replica: int) -> list[int]:
        started = self._members.started
        assert started is not None
        return [nodes[0] for nodes in started.nodes(replica)]


def recovery_summary(timing: RecoveryTiming, seconds: Callable[[float], float]) -> Json:
    """Return a recovery with the durations of its completed phases.

    ``seconds`` converts a clock time to seconds of the run. Phases:

    noticed: from the fault to its detection; replaced: until the replica is formed again; linked: until its members
    hold their edges; rebuilt: the part of that time that transfer and computation of the lost state took; redone: until
    the first microbatch completes again.
    """
    over: dict[str, float | None] = {"noticed": timing.notice, "replaced": timing.decide}
    if timing.linked_t is not None and timing.formed_t is not None:
        link_s = timing.linked_t - timing.formed_t
        rebuilt = min(link_s, timing.transfer + timing.rebuild)
        over |= {"linked": link_s - rebuilt, "rebuilt": rebuilt, "redone": timing.redo}
    phases = {name: round(took, 4) for name, took in over.items() if took is not None}
    started = timing.lost_t if timing.fault_t is None else timing.fault_t
    summary: Json = {
        "began": round(seconds(started), 4),
        "lost": round(seconds(timing.lost_t), 4),
        "where": timing.where,
        "nodes": list(timing.nodes),
        "workers": list(timing.workers),
        "causes": list(timing.causes),
        "new_workers": {str(node): worker for node, worker in timing.new_workers.items()},
        "step": timing.step,
        "outcome": timing.outcome,
        "attempts": timing.attempts,
        "phases": phases,
        "bytes": timing.transfer_bytes,
    }
    if timing.formed_t is not None:
        summary["formed"] = round(seconds(timing.formed_t), 4)
    if timing.linked_t is not None:
        summary["linked"] = round(seconds(timing.linked_t), 4)
    if timing.total is not None and timing.finished_t is not None:
        summary |= {"ended": round(seconds(timing.finished_t), 4), "total": round(timing.total, 4)}
    return summary
