"""A worker's part in the rounds of a coded step."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from planaria.control import events as e
from planaria.control.decisions import CloseRound
from planaria.exchange.coded.coding import Counted, Sent
from planaria.runtime.engine.coded_step import CodedSteps, Data, Sums
from planaria.runtime.engine.desk import Interrupted
from planaria.runtime.engine.perform import perform
from planaria.runtime.engine.post import Post
from planaria.runtime.engine.runner import StageRunner


class CodedRounds:
    """A worker's part in the rounds of one coded step."""

    def __init__(self, steps: CodedSteps, post: Post, runner: StageRunner, data: Data, spans: list[e.Span]) -> None:
        """Each action's span is appended to ``spans``."""
        self._steps, self._post, self._runner, self._data, self._spans = steps, post, runner, data, spans
        nodes = post.here.present.peers(post.here.node)
        self._others = {replica: node for replica, node in enumerate(nodes) if node != post.here.node}
        self._counted: Counted = ()
        self._sums = Sums()

    def run(self, begun: Callable[[int], None]) -> None:
        """Do the tasks of all rounds until the controller ends each; then take what they come to.

        ``begun`` is told of each round, by its number.

        :raises Interrupted: when the controller wants something else meanwhile.
        """
        here = self._post.here
        while len(self._counted) < self._steps.coding.rounds:
            begun(len(self._counted))
            counted = frozenset(self._round().counted)
            self._sums.close(here.number in counted)
            self._counted = (*self._counted, counted)
        start = time.monotonic()
        self._post.desk.at("exchange", here.step)
        self._steps.absorb(self._runner, self._counted, self._vector)
        self._spans.append(e.Span(action="exchange", start=start, end=time.monotonic()))

    def _round(self) -> CloseRound:
        """Work until the round is over, whether everything is done by then or not."""
        here = self._post.here
        try:
            for work in self._steps.work(here.step, self._counted, here.number):
                self._post.first_pass = work.number * self._steps.microbatches
                self._steps.begin(self._runner, work, self._data)
                perform(work.plan, self._post, self._runner, self._spans)
                round, share = len(self._counted), self._runner.share()
                if (vector := self._sums.add(work.task, here.number, round, share)) is not None:
                    part = self._steps.part(Sent(here.number, round, work.task.job, work.task.vector))
                    for node in self._others.values():
                        self._post.send_share(node, vector, part)
            here.report(e.ResultsSent, round=len(self._counted))
            self._post.desk.at("exchange", here.step)
            while True:
                self._post.hear(self._post.desk.next())
        except Interrupted as interrupted:
            order = interrupted.order
            if isinstance(order, CloseRound) and (order.generation, order.step) == (here.generation, here.step):
                return order
            raise

    def _vector(self, sent: Sent) -> Tensor:
        """What a node of this stage has sent in a round that counted there; that of another is waited for."""
        if sent.replica == self._post.here.number:
            return self._sums.sent[sent]
        like, node = self._runner.share(), self._others[sent.replica]
        return self._post.take_shares([node], like, self._steps.part(sent))[0]
