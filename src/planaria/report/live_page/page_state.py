"""Nodes, workers, machines and links as the live page shows them.

Assignments and statuses come from ``report/worker_assignments.py``; this adds pending states, faults and traffic.
"""

from __future__ import annotations

from collections import Counter

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.state.roster import identity_order
from planaria.report.live_page.frames import Json
from planaria.report.live_page.limits import MAX_LOST
from planaria.report.worker_assignments import WorkerAssignments

SILENCING_FAULTS = {
    "SIGKILL": "killed",
    "kill": "killed",
    "SIGSTOP": "frozen",
    "stop": "frozen",
    "stuck": "stuck",
    "cut": "cut",
}
"""faults that silence a worker, with their names on the page"""


class PageState:
    """Nodes, workers and links as the page shows them; ``members`` must process each fact first."""

    def __init__(self, members: WorkerAssignments) -> None:
        self._members = members
        self._reset()

    def _reset(self) -> None:
        self.source: dict[int, d.Source] = {}
        """node that waits for its state → its source"""
        self._links: dict[int, dict[str, str]] = {}
        """replica → link → open, opening or broken"""
        self._facts: dict[str, Json] = {}
        """worker → its reported properties and faults"""
        self._sent: Counter[str] = Counter()
        self._machines: dict[str, str] = {}
        """joined machine → its description"""
        self._deaths: list[str] = []
        """lost workers, in order"""
        self._lost = 0

    def apply(self, fact: e.Event | d.Decision | e.WorkReport) -> None:
        """Process a fact."""
        match fact:
            case e.RunStarted():
                self._reset()
            case d.Spawn():
                self._facts[fact.worker] = {"incarnation": fact.incarnation}
            case e.WorkerJoined():
                self._facts[fact.worker] = {"incarnation": fact.incarnation, "pid": fact.pid}
                self._facts[fact.worker] |= {"device": fact.device} if fact.device else {}
            case e.WorkerLeaving():
                self._facts_of(fact.worker)["leaving"] = True
            case d.ExcludeMember():
                for worker in fact.workers:
                    self._facts_of(worker)["excluded"] = True
            case e.WorkerLost():
                self._facts_of(fact.worker)["cause"] = fact.cause
                self._lost += fact.worker not in self._members.released | self._members.unstarted
                self._deaths = [*(w for w in self._deaths if w != fact.worker), fact.worker]
            case e.FaultInjected():
                self._apply_fault(fact)
            case e.HostJoined():
                self._machines[fact.host] = fact.detail
            case e.HostLeft():
                self._machines.pop(fact.host, None)
            case d.Form():
                self._apply_form(fact)
            case e.Linked():
                self._apply_linked(fact)
            case e.EdgeBroken() if fact.generation == self._members.generation.get(self._members.replica(fact.node)):
                self._links.setdefault(self._members.replica(fact.node), {})[_pair(fact.node, fact.peer)] = "broken"
            case d.Disband():
                self._links.pop(fact.replica, None)
            case e.WorkReport():
                self._apply_work_report(fact)

    def _facts_of(self, worker: str) -> Json:
        return self._facts.setdefault(worker, {})

    def _apply_fault(self, fault: e.FaultInjected) -> None:
        facts = self._facts_of(fault.worker)
        facts.pop("fault", None)
        if fault.signal in SILENCING_FAULTS:
            facts["fault"] = SILENCING_FAULTS[fault.signal]

    def _apply_form(self, form: d.Form) -> None:
        awaited: dict[int, d.Source] = {m.node: m.source for m in form.members if not isinstance(m.source, d.Keep)}
        for worker in form.holders.values():
            if self._facts_of(worker).get("fault") == "cut":  # it gets new connections
                del self._facts[worker]["fault"]
        others = {n: source for n, source in self.source.items() if self._members.replica(n) != form.replica}
        self.source = others | awaited
        before = self._links.get(form.replica, {})
        names = [_pair(link.low, link.high) for link in form.links]
        self._links[form.replica] = {name: "open" if before.get(name) == "open" else "opening" for name in names}

    def _apply_linked(self, linked: e.Linked) -> None:
        replica = self._members.replica(linked.node)
        if linked.generation != self._members.generation.get(replica):
            return
        self.source.pop(linked.node, None)
        links = self._links.get(replica, {})
        links.update(
            {name: "open" for name in links if str(linked.node) in name.split("-") and links[name] != "broken"}
        )

    def _apply_work_report(self, worked: e.WorkReport) -> None:
        self._sent.update({_pair(worked.node, peer): sent for peer, sent in worked.sent_bytes.items()})
        facts = self._facts_of(worked.worker)
        peaks = {"peak": worked.peak_bytes, "device_peak": worked.device_peak_bytes}
        facts |= {name: peak_bytes for name, peak in peaks.items() if (peak_bytes := max(peak, facts.get(name, 0)))}

    # ---- the shown state

    def snapshot(self) -> Json:
        """Return nodes, workers, machines and links."""
        return {
            "nodes": {str(node): self._node(node) for node in self._nodes()},
            "workers": {worker: self._worker(worker) for worker in self._shown_workers()},
            "machines": dict(self._machines),
            "links": self.links(),
            "lost": self._lost,
        }

    def links(self) -> Json:
        """Return state and, if known, bytes of every edge of the current generations."""
        state_of = {name: state for links in self._links.values() for name, state in links.items()}
        return {
            name: {"state": state} | ({"bytes": self._sent[name]} if name in self._sent else {})
            for name, state in state_of.items()
        }

    def peak(self, worker: str) -> Json:
        """Return a worker's peak memory."""
        return {name: value for name, value in self._facts.get(worker, {}).items() if name.endswith("peak")}

    def _nodes(self) -> list[int]:
        started = self._members.started
        if started is None:
            return []
        live = self._members.live
        return [node for node, replica in started.replica_of.items() if replica in live]

    def _node(self, node: int) -> Json:
        members, started = self._members, self._members.started
        assert started is not None
        summary: Json = {"replica": members.replica(node), "stage": started.stage_of[node]}
        worker = members.holders.get(node)
        if worker is None:
            return summary | {"state": "empty"}
        summary["worker"] = worker
        source = self.source.get(node)
        if source is None:
            return summary | {"state": "holds"}
        summary |= {"state": "waits", "from": source.origin}
        if isinstance(source, d.Rebuild):
            summary |= {"by": source.by, "donors": source.donors}
        return summary

    def _shown_workers(self) -> list[str]:
        """Return the workers to show: living, starting, and the last ones lost."""
        members = self._members
        lost = [worker for worker in self._deaths if worker in members.lost][-MAX_LOST:]
        current = [worker for worker in members.machine_of if worker not in members.lost]
        return sorted({*current, *lost}, key=identity_order)

    def _worker(self, worker: str) -> Json:
        summary: Json = {"status": self._members.status(worker)} | self._facts.get(worker, {})
        if machine := self._members.machine_of.get(worker):
            summary["machine"] = machine
        node = self._members.node_of.get(worker)
        return summary if node is None else summary | {"node": node}


def _pair(node: int, peer: int) -> str:
    return f"{min(node, peer)}-{max(node, peer)}"
