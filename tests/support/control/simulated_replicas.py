"""Simulated workers of several replicas, under the real apply and decide.

Messages between workers (updates of a round, copies of a lost stage) arrive separately, late or never.
"""

from __future__ import annotations

from dataclasses import replace

from planaria.control.checkpoint_decisions import save_awaiting_retry
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import Donate, Order
from planaria.control.rounds import round_wait_key
from planaria.control.state.run import RunState
from planaria.control.stop_reasons import stop_blockers
from support.control.replica_checks import Truth
from support.control.replica_worker import Content, Loan, Part, ReplicaWorker, lends
from support.control.simulation import DISK, Simulation

Mail = tuple[str, int, str]
"""an update in transit: link, sending replica, receiving worker"""


class SimulatedReplicas(Simulation):
    """Reports what a fleet of replicas would report."""

    most_decisions = 80

    def __init__(self, started: e.RunStarted) -> None:
        self.truth = Truth(started)
        self.alive: dict[str, ReplicaWorker] = {}
        self.unknown: dict[str, ReplicaWorker] = {}
        """dead workers that the controller takes for alive"""
        self.sent: list[str] = []
        """those of them that it has sent away"""
        self.gifts: dict[str, Content] = {}
        """link → state sent over it"""
        self.loans: dict[str, Loan] = {}
        """link → transfer that was ordered over it"""
        self.dead_links: set[str] = set()
        self.mail: list[Mail] = []
        self.grace: dict[int, int] = {}
        """replica → generation in which an edge of it broke"""
        self.waits: dict[int, tuple[int, int, bool] | None] = {}
        """replica → round in which it waits for others"""
        super().__init__(started)

    @property
    def ending(self) -> d.Finish | None:
        return self.truth.ending

    # ---- events

    def pending(self) -> list[str]:
        """Return the workers that have something to do, and the names of threads that write."""
        busy = [w for w, me in self.alive.items() if not me.joined or me.orders or self._given(me) or self._formed(me)]
        return busy + [w + DISK for w, me in self.alive.items() if me.writing]

    def work(self, worker: str) -> None:
        """Let ``worker`` carry out its next order and report."""
        me = self.alive[worker.removesuffix(DISK)]
        if worker.endswith(DISK):
            assert me.writing is not None
            part, me.writing = me.writing, None
            self._write(me, part)
            return
        if not me.joined:
            me.joined = True
            self.happened(e.WorkerJoined(worker=worker, incarnation=me.incarnation, pid=1))
        elif self._given(me):
            me.content, me.wants = self.gifts[me.wants[min(me.wants)]], {}
            self.gifts |= me.pay()
        elif self._formed(me):
            me.forming = False
            self.report(me, e.Linked, link_s=0.0)
        else:
            self.obey(me, me.orders.popleft())

    def lose(self, *workers: str) -> None:
        """Kill workers with their states and pending reports; nothing else happens in between."""
        self.kill(*workers)
        self.report_lost(*workers)

    def kill(self, *workers: str) -> None:
        """Kill workers without a notice to the controller."""
        self.unknown |= {worker: self.alive.pop(worker) for worker in workers}

    def report_lost(self, *workers: str) -> None:
        """Notify the controller of deaths, one after the other."""
        for worker in workers:
            dead = self.unknown.pop(worker)
            if not self.run.over:
                lost = e.WorkerLost(worker=worker, incarnation=dead.incarnation, cause="connection", detail="killed")
                self.happened(lost)

    def break_edge(self, worker: str, pick: int) -> None:
        """Break an edge of ``worker``: to a neighbour, or one over which it expects a state. An odd ``pick`` is blamed
        on an invalid message.
        """
        me = self.alive[worker]
        edges = {**me.links, **(me.wants if me.forming else {})}
        if edges:
            peer = sorted(edges)[pick % len(edges)]
            self.dead_links.add(edges[peer])
            self._report_broken(me, peer, invalid=bool(pick % 2))

    def deliver(self, pick: int, fate: str = "arrives") -> None:
        """Deliver an update ("arrives"), lose it ("lost"), or deliver an invalid ("wrong") or another one ("other")."""
        link, source, worker = self.mail.pop(pick % len(self.mail))
        me = self.alive.get(worker)
        if me is not None and link in me.meeting.values() and fate == "wrong":
            self.report(me, e.UpdateRejected, round=me.round, replica=source, reason="not finite")
        elif me is not None and link in me.meeting.values() and fate in ("arrives", "other"):
            me.received[source] = str(source) if fate == "arrives" else f"{source}, sent to {me.name}"
            rule = self.run.exchange
            products = me.products(rule.weighing, source, twisted=fate == "other" and rule.synchronised)
            values = {"round": me.round, "replica": source, "digest": me.received[source], "products": products}
            self.report(me, e.UpdateReceived, **values)

    def suspicious(self) -> list[int]:
        """Return the replicas with a broken edge but no reported death."""
        return [n for n, g in self.grace.items() if g == self.run.replicas[n].generation and not self.run.over]

    def expire_grace(self, replica: int) -> None:
        self.happened(e.GraceExpired(replica=replica, generation=self.grace.pop(replica)))

    def impatient(self) -> list[tuple[int, int, bool]]:
        """Return the waits of replicas for others in a round."""
        return sorted(wait for wait in self.waits.values() if wait is not None) if not self.run.over else []

    def lose_patience(self, wait: tuple[int, int, bool]) -> None:
        self.happened(e.RoundWaitExpired(replica=wait[0], round=wait[1], in_round=wait[2]))

    def behave(self, most: int = 20000) -> None:
        """Run workers and clocks until nothing is left to do."""
        for turn in range(most):
            if pending := self.pending():
                self.work(pending[turn % len(pending)])
            elif self.mail:
                self.deliver(0)
            elif suspicious := self.suspicious():
                self.expire_grace(suspicious[0])
            elif impatient := self.impatient():
                self.lose_patience(impatient[0])
            elif save_awaiting_retry(self.run) is not None:
                self.retry_save()
            elif self.run.stops_before_repair and not (self.run.overdue or self.run.over) and stop_blockers(self.run):
                self.expire_stop()
            elif not self.on_exhausted():
                return
        raise AssertionError(f"still busy after {most} things: {self.run}")

    def on_exhausted(self) -> bool:
        """Cause a further event once workers and clocks have nothing left to do; False if there is none."""
        return False

    def happened(self, event: e.Event) -> None:
        super().happened(event)
        while self.sent:
            self.report_lost(self.sent.pop())

    def on_event(self, event: e.Event) -> None:
        if isinstance(event, e.EdgeBroken) and (replica := self.run.replica_of(event.worker)) and replica.broken_edges:
            self.grace[replica.number] = replica.generation

    def on_idle(self) -> None:
        self.truth.check_synchronised(self.run, {**self.alive, **self.unknown})
        self._update_waits()

    def _update_waits(self) -> None:
        """Update the waits; they may differ only in replicas that have changed."""
        now = {number: round_wait_key(self.run, replica) for number, replica in self.run.replicas.items()}
        assert all(now[number] == self.waits.get(number) for number in now if number not in self.run.undecided)
        self.waits = now

    def validate(self, decision: d.Decision, before: RunState) -> None:
        self.truth.validate(decision, before, self.run, {**self.alive, **self.unknown})

    # ---- orders

    def carry_out(self, decision: d.Decision) -> None:
        """Deliver orders to workers, or start one."""
        replicas = self.run.replicas
        match decision:
            case d.Spawn():
                self.alive[decision.worker] = ReplicaWorker(decision.worker, decision.incarnation, decision.host)
            case d.Form() | d.RunStep() | d.Commit() | d.Save():
                self.order(decision, replicas[decision.replica].waiting)
                if isinstance(decision, d.Form):
                    self.borrow(decision)
            case d.BeginRound() | d.Settle():
                self.order(decision, [w for n in decision.members for w in replicas[n].holders.values()])
            case d.Disband():
                self.order(decision, decision.workers)
            case d.ExcludeMember():
                self.kill(*decision.workers)
                self.sent += decision.workers
            case d.Seal() if any(me.writing and not self._astray(me) for me in self.alive.values()):
                raise AssertionError("files are removed while a worker writes")
            case d.Seal() if self.is_full():
                self.truth.unseal(decision)
                self.report_seal_failed(decision)
            case d.Discard():
                writing: set[object] = {r.generation for r in self.run.live.values() if r.phase == "save"}
                writing |= {me.name for me in self.alive.values() if me.writing and not self._astray(me)}
                assert not writing, "files are removed while a worker writes"
                self.truth.parts = {key: part for key, part in self.truth.parts.items() if key[0] != decision.step}
            case d.Finish():
                self.alive.clear()
                self.mail.clear()

    def order(self, order: Order, workers: frozenset[str] | list[str]) -> None:
        """Put an order into the inboxes of the living among ``workers``."""
        for me in [self.alive[worker] for worker in workers if worker in self.alive]:
            if isinstance(
                order, d.RunStep | d.Commit | d.BeginRound | d.Settle
            ):  # a waiting worker would not receive it
                if isinstance(order, d.BeginRound) and self.run.exchange.decoupled and not me.forming:
                    me.orders.append(order)
                    continue
                busy = [o for o in me.orders if not isinstance(o, Donate | d.BeginRound)]
                assert not busy and not me.forming, f"{order.kind} for {me.name}, which is at {busy or 'Form'}"
            me.orders.append(order)

    def borrow(self, form: d.Form) -> None:
        """Order workers of other replicas, and leaving ones, to send their stages."""
        for member in form.members:
            if isinstance(member.source, d.Handover):
                self._ask(form, member, d.PREDECESSOR, member.source.worker)
            for donor in member.source.donors if isinstance(member.source, d.Rebuild) else ():
                if donor in self.run.replicas[form.replica].donor_workers:
                    self._ask(form, member, donor, self.run.holders[donor])

    def _ask(self, form: d.Form, member: d.Member, donor: int, giver: str) -> None:
        link = d.state_link(form.generation, donor, member.node)
        self.loans[link] = Loan(giver, member.worker, form.replica, form.generation)
        self.order(Donate(donor=donor, to=member.node, stage=member.stage, link=link), [giver])

    # ---- workers

    def obey(self, me: ReplicaWorker, order: Order) -> None:
        """Carry out an order and report."""
        match order:
            case d.Form():
                self._form(me, order)
            case Donate():
                assert me.node == (order.to if order.donor == d.PREDECESSOR else order.donor), (
                    "a worker is ordered to send another node's stage"
                )
                assert me.content is not None, "a worker is ordered to send a state it does not have"
                self.gifts[order.link] = me.content
                self._judge_loan(me, order)
            case d.RunStep() if order.generation == me.generation:
                assert me.step == order.step and me.content is not None
                me.block = order.block if order.mode == "train" else -1
                self.report(me, e.StageReady, step=order.step, mode=order.mode, loss=1.0, grad_norm=1.0)
            case d.Commit() if order.generation == me.generation:
                assert me.step == order.step and me.block >= 0 and me.content is not None
                me.content = replace(me.content, blocks=(*me.content.blocks, me.block))
                me.step, me.inner = me.step + 1, None if me.inner is None else me.inner + 1
                self.report(me, e.StageCommitted, step=order.step)
            case d.BeginRound() if self._is_ours(me, order):
                self._meet(me, order)
            case d.Settle() if self._is_ours(me, order):
                self._settle(me, order)
            case d.Save():
                assert me.content is not None, "a stage without a state is being saved"
                assert not me.writing or self._astray(me), "two files at a time"
                standing = None
                if me.round < 0 and me.inner is not None:
                    standing = e.ReplicaPosition(step=me.step, rounds=me.rounds, inner=me.inner)
                part = Part(order, me.stage, me.content, me.step, standing)
                if order.background:
                    me.writing = part
                    self.report(me, e.StageCopied, step=order.step)
                else:
                    self._write(me, part)
            case d.Disband():
                me.drop_round()
                me.node, me.content, me.forming, me.links = -1, None, False, {}

    def _astray(self, me: ReplicaWorker) -> bool:
        """Was its replica disbanded before it reported the copy? A real worker finishes the first file first."""
        assert me.writing is not None
        return self.run.replicas[me.writing.order.replica].saved_generation != me.writing.order.generation or (
            me.name not in self.run.writing
        )

    def _write(self, me: ReplicaWorker, part: Part) -> None:
        order = part.order
        of = {"step": order.step, "generation": order.generation, "stage": part.stage}
        if self.is_full():
            self.report(me, e.SaveFailed, **of, detail="disk full")
            return
        written = self.truth.parts.setdefault((order.step, order.replica, order.generation), {})
        written[part.stage] = part.content, part.step, part.standing
        self.report(me, e.StageSaved, **of, bytes=1)

    def _form(self, me: ReplicaWorker, form: d.Form) -> None:
        mine = me.join_formation(form)
        match mine.source:
            case d.Fresh():
                me.content = Content()
            case d.Load(folder=folder):
                me.content = self.truth.folders[folder].content[form.replica, me.stage]
        if form.outcome != "rolled back" and isinstance(mine.source, d.Fresh | d.Load):
            kept = {m.worker: m.node for m in form.members if isinstance(m.source, d.Keep)}
            others = [o for o in self.alive.values() if kept.get(o.name) == o.node and not o.orders]
            whole = [o for o in others if o.content is not None and not o.content.is_rebuilt]
            for other in (o for o in whole if o.generation <= form.generation):
                begun = self.truth.beginnings(mine.source, form.replica, other.stage)
                assert other.content is not None
                lent = not set(other.content.blocks) & set(
                    self.truth.ledger[form.replica]
                )  # by a replica that is ahead
                assert other.content in begun or lent, "a stage starts anew beside others that have trained"
        if me.owes and not me.wants:
            self.gifts |= me.pay()
        for peer in [peer for peer, link in me.links.items() if link in self.dead_links]:
            self._report_broken(me, peer)

    def _given(self, me: ReplicaWorker) -> bool:
        """Has everything arrived that it builds its state from?"""
        return bool(me.wants) and all(link in self.gifts.keys() - self.dead_links for link in me.wants.values())

    def _formed(self, me: ReplicaWorker) -> bool:
        """Does it have its state, and are its edges open?"""
        return me.forming and not me.wants and all(self._open(me, *edge) for edge in me.links.items())

    def _open(self, me: ReplicaWorker, peer: int, link: str) -> bool:
        ends = [o for o in self.alive.values() if o.node == peer and o.links.get(me.node) == link]
        return link not in self.dead_links and bool(ends)

    def _judge_loan(self, me: ReplicaWorker, order: Donate) -> None:
        """A copy of a whole replica continues at the step and round of its original."""
        form = next(f for f in reversed(self.history) if isinstance(f, d.Form) and lends(f, order.link))
        if self.run.replicas[me.replica].broken or me.round >= 0:  # it may have left the round that its workers are in
            return
        if all(isinstance(m.source, d.Rebuild) and m.source.by == d.PEER for m in form.members):
            same = form.rounds == me.rounds and me.inner in (None, form.inner)
            assert same, "a copy differs from its original in step or round"

    def _is_ours(self, me: ReplicaWorker, order: d.BeginRound | d.Settle) -> bool:
        return dict(zip(order.members, order.generations, strict=True)).get(me.replica) == me.generation

    def _meet(self, me: ReplicaWorker, order: d.BeginRound) -> None:
        me.drop_round()
        me.round, me.rounds, me.inner = order.round, order.round + 1, 0
        ends = [(link.low, link.high, link.id) for link in order.links if me.node in (link.low, link.high)]
        me.meeting = {high if low == me.node else low: link for low, high, link in ends}
        digest = str(me.replica) if self.run.exchange.detects_equivocation(len(order.members)) else ""
        if (products := me.products(self.run.exchange.weighing, me.replica)) or digest:
            values = {"round": me.round, "replica": me.replica, "digest": digest, "products": products}
            self.report(me, e.UpdateReceived, **values)
        for peer, link in me.meeting.items():
            for other in self.alive.values():
                if other.node == peer and other.meeting.get(me.node) == link:
                    self.mail += [(link, me.replica, other.name), (link, other.replica, me.name)]

    def _settle(self, me: ReplicaWorker, order: d.Settle) -> None:
        counted = order.contributors or order.members
        others = {member for member in counted if member != me.replica}
        assert not others or me.round == order.round, "a round is settled with updates that were dropped"
        assert others <= me.received.keys(), "a round is settled with an update that was not received"
        if self.run.exchange.detects_equivocation(len(order.members)):
            assert all(me.received[other] == str(other) for other in others), "members use different updates"
        self.truth.check_weighed(order, me)
        assert me.content is not None
        if me.round != order.round:
            me.inner = 0
        elif not others:  # perhaps of a cancelled round, which starts with this
            me.inner = None
        me.content = replace(me.content, outer=(*me.content.outer, (order.round, *counted)))
        me.rounds = order.round + 1
        me.drop_round()
        self.report(me, e.RoundApplied, round=order.round, blocking_bytes=0, prefetched_bytes=0, spread=0.0)

    def _report_broken(self, me: ReplicaWorker, peer: int, invalid: bool = False) -> None:
        self.report(me, e.EdgeBroken, peer=peer, detail="reset", invalid=invalid)
