"""Several replicas without processes: workers that do as they are told, under the real apply and decide.

What they say to one another (offers of a round, copies of a lost stage) travels by itself, late or never.
"""

from __future__ import annotations

from dataclasses import replace

from fresh import decided_alike
from herd_truth import Truth
from herd_worker import Content, HerdWorker, Loan, Part, lends
from pretender import DISK

from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.apply import apply
from planaria.control.apply_base import decided
from planaria.control.decide import decide
from planaria.control.rounds import waiting
from planaria.control.saving import resting
from planaria.control.state import RunState
from planaria.control.waits import held_up

MOST_DECISIONS = 80
"""in a row without anything happening; starting all workers and spares is the longest honest chain"""
Mail = tuple[str, int, str]
"""an offer under way: link, from which replica, to which worker"""


class PretendHerd:
    """Feeds the controller's pure half with what a fleet of replicas would report."""

    def __init__(self, started: e.RunStarted) -> None:
        self.run, self.started, self.truth = RunState.start(started), started, Truth(started)
        self.alive: dict[str, HerdWorker] = {}
        self.unknown: dict[str, HerdWorker] = {}
        """dead, and the controller does not know yet"""
        self.sent: list[str] = []
        """of them, those that it has sent away"""
        self.history: list[e.Event | d.Decision] = []
        self.gifts: dict[str, Content] = {}
        """link → what has been sent over it"""
        self.loans: dict[str, Loan] = {}
        """link → who was asked to send what over it"""
        self.dead_links: set[str] = set()
        self.mail: list[Mail] = []
        self.room = self.full = 0
        """so many files (stages and manifests) can be written yet, and so many after these cannot be"""
        self.sound = True
        """nothing has gone wrong yet that must not"""
        self.grace: dict[int, int] = {}
        """replica → generation in which an edge of it broke"""
        self.waits: dict[int, tuple[int, int, bool] | None] = {}
        """replica → which round it waits for others in"""
        self.happened(started)

    # ---- what may happen

    def pending(self) -> list[str]:
        """Workers that have something to do, and their threads that write."""
        busy = [w for w, me in self.alive.items() if not me.joined or me.orders or self._given(me) or self._formed(me)]
        return busy + [w + DISK for w, me in self.alive.items() if me.writing]

    def work(self, worker: str) -> None:
        """``worker`` does the next thing that it was told to, and reports."""
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
        """Workers die, with all that they knew and had still to say; nothing else happens in between."""
        self.kill(*workers)
        self.tell_lost(*workers)

    def kill(self, *workers: str) -> None:
        """Workers die; the controller has not heard of it."""
        self.unknown |= {worker: self.alive.pop(worker) for worker in workers}

    def tell_lost(self, *workers: str) -> None:
        """The controller hears of deaths, one after the other."""
        for worker in workers:
            gone = self.unknown.pop(worker)
            if not self.run.over:
                lost = e.WorkerLost(worker=worker, incarnation=gone.incarnation, cause="connection", detail="killed")
                self.happened(lost)

    def break_edge(self, worker: str, pick: int) -> None:
        """An edge of ``worker`` breaks: to a neighbour, or one over which a gift was to come."""
        me = self.alive[worker]
        edges = {**me.links, **(me.wants if me.forming else {})}
        if edges:
            peer = sorted(edges)[pick % len(edges)]
            self.dead_links.add(edges[peer])
            self._report_broken(me, peer)

    def deliver(self, pick: int, fate: str = "arrives") -> None:
        """An offer arrives, or never will ("lost"), or is of no use ("wrong"), or is not what others hear ("other")."""
        link, source, worker = self.mail.pop(pick % len(self.mail))
        me = self.alive.get(worker)
        if me is not None and link in me.meeting.values() and fate == "wrong":
            self.report(me, e.OfferRefused, round=me.round, replica=source, reason="not finite")
        elif me is not None and link in me.meeting.values() and fate in ("arrives", "other"):
            me.heard[source] = str(source) if fate == "arrives" else f"{source}, told {me.name}"
            rule = self.run.rule
            products = me.products(rule.weighing, source, twisted=fate == "other" and rule.synchronised)
            what = {"round": me.round, "replica": source, "digest": me.heard[source], "products": products}
            self.report(me, e.OfferHeard, **what)

    def suspicious(self) -> list[int]:
        """Replicas with a broken edge, for which nobody has turned out to be dead yet."""
        return [n for n, g in self.grace.items() if g == self.run.replicas[n].generation and not self.run.over]

    def expire_grace(self, replica: int) -> None:
        self.happened(e.GraceExpired(replica=replica, generation=self.grace.pop(replica)))

    def impatient(self) -> list[tuple[int, int, bool]]:
        """Who waits for others in a round."""
        return sorted(who for who in self.waits.values() if who is not None) if not self.run.over else []

    def lose_patience(self, who: tuple[int, int, bool]) -> None:
        self.happened(e.PatienceOver(replica=who[0], round=who[1], meeting=who[2]))

    def is_full(self) -> bool:
        """Will the next file not be written?"""
        if self.room or not self.full:
            self.room -= self.room > 0
            return False
        self.full -= 1
        return True

    def try_again(self) -> None:
        """It has been a while since the last save failed."""
        step = resting(self.run)
        assert step is not None
        self.happened(e.RetryDue(step=step))

    def stop(self, prompt: bool = False) -> None:
        self.happened(e.StopRequested(reason="someone asked", prompt=prompt))

    def stop_waits_no_longer(self) -> None:
        """``fleet.stop_s`` have passed since the stop request."""
        if detail := held_up(self.run):
            self.happened(e.StopOverdue(detail=detail))

    def behave(self, most: int = 20000) -> None:
        """Everyone works, and clocks run, until nobody has anything left to do."""
        for turn in range(most):
            if pending := self.pending():
                self.work(pending[turn % len(pending)])
            elif self.mail:
                self.deliver(0)
            elif suspicious := self.suspicious():
                self.expire_grace(suspicious[0])
            elif impatient := self.impatient():
                self.lose_patience(impatient[0])
            elif resting(self.run) is not None:
                self.try_again()
            elif not self.go_on():
                return
        raise AssertionError(f"still busy after {most} things: {self.run}")

    def go_on(self) -> bool:
        """What happens when workers and clocks have nothing left to do; False if nothing does."""
        return False

    def happened(self, event: e.Event) -> None:
        """What the controller's loop does with an event."""
        self.sound = False
        self.history.append(event)
        self.run = apply(event, self.run)
        if isinstance(event, e.EdgeBroken) and (blamed := self.run.replica_of(event.worker)) and blamed.suspects:
            self.grace[blamed.number] = blamed.generation
        for _ in range(MOST_DECISIONS):
            decision = decided_alike(self.run)
            if decision is None:
                self.truth.check_synchronised(self.run, {**self.alive, **self.unknown})
                self._note_who_waits()
                self.sound, self.run = True, decided(self.run)
                while self.sent:
                    self.tell_lost(self.sent.pop())
                return
            before, self.run = self.run, apply(decision, self.run)
            self.history.append(decision)
            assert decide(self.run) != decision, "the same decision twice"
            self.judge(decision, before)
            self.carry_out(decision)
        raise AssertionError(f"decisions without end: {self.history[-MOST_DECISIONS:]}")

    def _note_who_waits(self) -> None:
        """Who waits for others is asked again only of replicas that have changed."""
        now = {number: waiting(self.run, replica) for number, replica in self.run.replicas.items()}
        changed = now if self.run.undecided is None else self.run.undecided
        assert all(now[number] == self.waits.get(number) for number in now if number not in changed)
        self.waits = now

    def judge(self, decision: d.Decision, before: RunState) -> None:
        """Hold a decision against what is true."""
        self.truth.judge(decision, before, self.run, {**self.alive, **self.unknown})

    # ---- how orders reach workers

    def carry_out(self, decision: d.Decision) -> None:
        """Tell workers, or start one."""
        replicas = self.run.replicas
        match decision:
            case d.Spawn():
                self.alive[decision.worker] = HerdWorker(decision.worker, decision.incarnation, decision.host)
            case d.Form() | d.RunStep() | d.Commit() | d.Save():
                self.order(decision, replicas[decision.replica].waiting)
                if isinstance(decision, d.Form):
                    self.borrow(decision)
            case d.Meet() | d.Settle():
                self.order(decision, [w for n in decision.members for w in replicas[n].holders.values()])
            case d.Disband():
                self.order(decision, decision.workers)
            case d.SendAway():
                self.kill(*decision.workers)
                self.sent += decision.workers
            case d.Seal() if any(me.writing and not self._astray(me) for me in self.alive.values()):
                raise AssertionError("removed under somebody's hands")
            case d.Seal() if self.is_full():
                self.truth.unseal(decision)
                who = {"worker": e.CONTROLLER, "stage": -1, "generation": -1, "step": decision.step}
                self.happened(e.SaveFailed.model_validate(who | {"detail": "disk full"}))
            case d.Discard():
                writing: set[object] = {r.generation for r in self.run.live.values() if r.phase == "save"}
                writing |= {me.name for me in self.alive.values() if me.writing and not self._astray(me)}
                assert not writing, "removed under somebody's hands"
                self.truth.parts = {key: part for key, part in self.truth.parts.items() if key[0] != decision.step}
            case d.Finish():
                self.alive.clear()
                self.mail.clear()

    def order(self, order: d.Order, workers: frozenset[str] | list[str]) -> None:
        """Put an order into the inboxes of those that live."""
        for me in [self.alive[worker] for worker in workers if worker in self.alive]:
            if isinstance(order, d.RunStep | d.Commit | d.Meet | d.Settle):  # a worker that waits would not hear it
                busy = [o for o in me.orders if not isinstance(o, d.Donate | d.Meet)]
                assert not busy and not me.forming, f"{order.kind} for {me.name}, which is at {busy or 'Form'}"
            me.orders.append(order)

    def borrow(self, form: d.Form) -> None:
        """Ask workers of other replicas, or such that leave, for their stages."""
        for member in form.members:
            if isinstance(member.source, d.Handover):
                self._ask(form, member, d.BEFORE, member.source.worker)
            for donor in member.source.donors if isinstance(member.source, d.Rebuild) else ():
                if donor in self.run.replicas[form.replica].lenders:
                    self._ask(form, member, donor, self.run.holders[donor])

    def _ask(self, form: d.Form, member: d.Member, donor: int, giver: str) -> None:
        link = d.state_link(form.generation, donor, member.node)
        self.loans[link] = Loan(giver, member.worker, form.replica, form.generation)
        self.order(d.Donate(donor=donor, to=member.node, stage=member.stage, link=link), [giver])

    # ---- how workers take it

    def obey(self, me: HerdWorker, order: d.Order) -> None:
        """Do as told, and report."""
        match order:
            case d.Form():
                self._form(me, order)
            case d.Donate():
                assert me.node == (order.to if order.donor == d.BEFORE else order.donor), "asked for another's stage"
                assert me.content is not None, "asked for what it does not have"
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
            case d.Meet() if self._is_ours(me, order):
                self._meet(me, order)
            case d.Settle() if self._is_ours(me, order):
                self._settle(me, order)
            case d.Save():
                assert me.content is not None, "a stage without a state is being saved"
                assert not me.writing or self._astray(me), "two files at a time"
                standing = None
                if me.round < 0 and me.inner is not None:
                    standing = e.Standing(step=me.step, rounds=me.rounds, inner=me.inner)
                part = Part(order, me.stage, me.content, me.step, standing)
                if order.background:
                    me.writing = part
                    self.report(me, e.StageCopied, step=order.step)
                else:
                    self._write(me, part)
            case d.Disband():
                me.drop_round()
                me.node, me.content, me.forming, me.links = -1, None, False, {}

    def _astray(self, me: HerdWorker) -> bool:
        """Was its replica disbanded before it had said that it writes? The real one finishes the first file first."""
        assert me.writing is not None
        return self.run.replicas[me.writing.order.replica].saved_in != me.writing.order.generation or (
            me.name not in self.run.writing
        )

    def _write(self, me: HerdWorker, part: Part) -> None:
        order = part.order
        of = {"step": order.step, "generation": order.generation, "stage": part.stage}
        if self.is_full():
            self.report(me, e.SaveFailed, **of, detail="disk full")
            return
        written = self.truth.parts.setdefault((order.step, order.replica, order.generation), {})
        written[part.stage] = part.content, part.step, part.standing
        self.report(me, e.StageSaved, **of, bytes=1)

    def _form(self, me: HerdWorker, form: d.Form) -> None:
        mine = me.stand(form)
        match mine.source:
            case d.Fresh():
                me.content = Content()
            case d.Load(folder=folder):
                me.content = self.truth.folders[folder].content[form.replica, me.stage]
        if form.outcome != "rolled back" and isinstance(mine.source, d.Fresh | d.Load):
            kept = {m.worker: m.node for m in form.members if isinstance(m.source, d.Keep)}
            others = [o for o in self.alive.values() if kept.get(o.name) == o.node and not o.orders]
            whole = [o for o in others if o.content is not None and not o.content.is_made_up]
            for other in (o for o in whole if o.generation <= form.generation):
                begun = self.truth.beginnings(mine.source, form.replica, other.stage)
                assert other.content is not None
                lent = not set(other.content.blocks) & set(self.truth.ledger[form.replica])  # by a replica ahead of it
                assert other.content in begun or lent, "a stage begins anew beside others that have moved on"
        if me.owes and not me.wants:
            self.gifts |= me.pay()
        for peer in [peer for peer, link in me.links.items() if link in self.dead_links]:
            self._report_broken(me, peer)

    def _given(self, me: HerdWorker) -> bool:
        """Is all there that its state is to be made of?"""
        return bool(me.wants) and all(link in self.gifts.keys() - self.dead_links for link in me.wants.values())

    def _formed(self, me: HerdWorker) -> bool:
        """Has it its state, and are the edges open?"""
        return me.forming and not me.wants and all(self._open(me, *edge) for edge in me.links.items())

    def _open(self, me: HerdWorker, peer: int, link: str) -> bool:
        ends = [o for o in self.alive.values() if o.node == peer and o.links.get(me.node) == link]
        return link not in self.dead_links and bool(ends)

    def _judge_loan(self, me: HerdWorker, order: d.Donate) -> None:
        """Whoever goes on as a copy of all stages of another stands where the other stood at this moment."""
        form = next(f for f in reversed(self.history) if isinstance(f, d.Form) and lends(f, order.link))
        if self.run.replicas[me.replica].broken or me.round >= 0:  # it may have left the round that its workers are in
            return
        if all(isinstance(m.source, d.Rebuild) and m.source.by == d.PEER for m in form.members):
            stands = form.rounds == me.rounds and me.inner in (None, form.inner)
            assert stands, "a copy does not stand where its original did"

    def _is_ours(self, me: HerdWorker, order: d.Meet | d.Settle) -> bool:
        return dict(zip(order.members, order.generations, strict=True)).get(me.replica) == me.generation

    def _meet(self, me: HerdWorker, order: d.Meet) -> None:
        me.drop_round()
        me.round, me.rounds, me.inner = order.round, order.round + 1, 0
        ends = [(link.low, link.high, link.id) for link in order.links if me.node in (link.low, link.high)]
        me.meeting = {high if low == me.node else low: link for low, high, link in ends}
        digest = str(me.replica) if self.run.rule.witnessed(len(order.members)) else ""
        if (products := me.products(self.run.rule.weighing, me.replica)) or digest:
            what = {"round": me.round, "replica": me.replica, "digest": digest, "products": products}
            self.report(me, e.OfferHeard, **what)
        for peer, link in me.meeting.items():
            for other in self.alive.values():
                if other.node == peer and other.meeting.get(me.node) == link:
                    self.mail += [(link, me.replica, other.name), (link, other.replica, me.name)]

    def _settle(self, me: HerdWorker, order: d.Settle) -> None:
        others = {member for member in order.members if member != me.replica}
        assert not others or me.round == order.round, "a round is settled with offers that were dropped"
        assert others <= me.heard.keys(), "a round is settled with an offer that was not heard"
        if self.run.rule.witnessed(len(order.members)):
            assert all(me.heard[other] == str(other) for other in others), "members go by different offers"
        self.truth.check_weighed(order, me)
        assert me.content is not None
        if me.round != order.round:
            me.inner = 0
        elif not others:  # perhaps of a round that was called off, and begins with this
            me.inner = None
        me.content = replace(me.content, outer=(*me.content.outer, (order.round, *order.members)))
        me.rounds = order.round + 1
        me.drop_round()
        self.report(me, e.RoundMade, round=order.round, blocking_bytes=0, prefetched_bytes=0, apart=0.0)

    def _report_broken(self, me: HerdWorker, peer: int) -> None:
        self.report(me, e.EdgeBroken, peer=peer, detail="reset")

    def report(self, me: HerdWorker, kind: type[e.Fact], **what: object) -> None:
        """Tell the controller a fact, with all that a worker says of itself."""
        facts = {"worker": me.name, "node": me.node, "stage": me.stage, "generation": me.generation} | what
        facts.setdefault("replica", me.replica)
        self.happened(kind.model_validate({name: facts[name] for name in facts.keys() & kind.model_fields.keys()}))  # type: ignore[arg-type]
