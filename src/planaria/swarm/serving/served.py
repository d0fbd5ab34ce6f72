"""Completions from a server: how far its weights may lag, when it is given new ones, and who draws when it fails.

The policy of the peer is the one that learns. A server draws with the weights that it was given last; they may be
``policy.behind`` rounds old, and the loss corrects for that by the log-probabilities that the server tells
(:mod:`planaria.swarm.learning.loss`, F-TIS). What would be older, and what a server does not deliver in time, the
policy draws by itself: a round never waits for more than ``policy.serving.timeout_s``.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from planaria.swarm.config import SwarmConfig
from planaria.swarm.draws import derived
from planaria.swarm.policy.base import Drawn, Policy
from planaria.swarm.serving.client import Client, ServerFailed
from planaria.swarm.serving.protocol import BadReply, Words, completions, reply_bytes, request
from planaria.swarm.serving.record import Serving
from planaria.swarm.serving.weights import Pushing

MOST_REST = 16
"""rounds for which a server that failed again and again is left alone"""


@dataclass
class Rest:
    """How long to leave a server alone that failed: one round, then two, four, …"""

    failures: int = 0
    until: int = 0

    def failed(self, number: int) -> None:
        self.failures += 1
        self.until = number + min(MOST_REST, 2 ** (self.failures - 1))

    def worked(self) -> None:
        self.failures = 0


@dataclass
class _Count:
    """What several threads count together."""

    requests: int = 0
    waiting: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Server:
    """One peer's server: its weights' age is known here, and nowhere else."""

    def __init__(self, config: SwarmConfig, policy: Policy, folder: Path, peer: str) -> None:
        """:raises UserError: when the server cannot be reached, or what is set for it is wrong."""
        self._config, self._policy, self._peer = config, policy, peer
        self._client = Client(config.policy)
        model = self._client.model(config.policy.serving.model)
        self._pushing = Pushing(config.policy, policy, folder, model, peer)
        self._words = Words(policy.encode, policy.decode, policy.vocab, policy.end)
        self._held, self._rest = 0, Rest()
        self.found = Serving()
        """of the last round"""

    def begin(self, first: int) -> None:
        """Before round ``first`` the server's weights are the policy's: neither has learned yet."""
        self._held = first

    def draw(self, number: int, prompts: Sequence[Sequence[int]], count: int) -> list[list[Drawn]] | None:
        """``count`` completions of every prompt for round ``number``; None if the policy must draw them itself.

        :attr:`found` says what was done, and why not more.
        """
        if number < self._rest.until:
            self.found = Serving(local=f"the server failed; it is asked again in round {self._rest.until}")
            return None
        began, until = time.monotonic(), time.monotonic() + self._config.policy.serving.timeout_s
        unpushed = self._push(number, until)
        behind = number - self._held
        if behind > self._config.policy.behind:
            local = f"its weights are {behind} rounds old, of at most {self._config.policy.behind} (policy.behind)"
            self.found = Serving(behind=behind, unpushed=unpushed, local=local)
            return None
        counts, drew = _Count(), time.monotonic()
        try:
            drawn = self._draw_all(number, prompts, count, until, counts)
        except (ServerFailed, BadReply) as error:
            self._rest.failed(number)
            self.found = Serving(
                seconds=time.monotonic() - began, requests=counts.requests, unpushed=unpushed, local=str(error)
            )
            return None
        self._rest.worked()
        flat = [one for group in drawn for one in group]
        self.found = Serving(
            tokens=sum(len(one.ids) + one.ended for one in flat),
            seconds=time.monotonic() - drew,
            requests=counts.requests,
            queue=counts.waiting,
            behind=behind,
            claimed=sum(bool(one.logps) for one in flat) / max(1, len(flat)),
            unpushed=unpushed,
        )
        return drawn

    def _push(self, number: int, until: float) -> str:
        """Give the server this round's weights, if its own are older and it can load some; why it did not get them."""
        if self._held == number or self._pushing.unable:
            return self._pushing.unable if self._held != number else ""
        try:
            self._pushing.push(self._client, number, until)
        except ServerFailed as error:
            return str(error)
        self._held = number
        return ""

    def _draw_all(
        self, number: int, prompts: Sequence[Sequence[int]], count: int, until: float, counts: _Count
    ) -> list[list[Drawn]]:
        """Every prompt's completions, so many requests at once as the recipe allows."""
        at_once = min(self._config.policy.serving.at_once, len(prompts))
        left: queue.SimpleQueue[int] = queue.SimpleQueue()
        found: list[list[Drawn]] = [[] for _ in prompts]
        for place in range(len(prompts)):
            left.put(place)
        counts.waiting = max(0, len(prompts) - at_once)

        def work() -> None:
            while True:
                try:
                    place = left.get_nowait()
                except queue.Empty:
                    return
                found[place] = self._draw_one(number, place, prompts[place], count, until, counts)

        with ThreadPoolExecutor(max(1, at_once), thread_name_prefix="planaria-server") as pool:
            for done in [pool.submit(work) for _ in range(at_once)]:
                done.result()
        return found

    def _draw_one(
        self, number: int, place: int, prompt: Sequence[int], count: int, until: float, counts: _Count
    ) -> list[Drawn]:
        """Completions of one prompt. A server that gives fewer at once than it was asked for is asked again."""
        sampling = self._config.sampling
        most = min(sampling.max_new, self._policy.context - len(prompt))
        top_k = sampling.support(self._policy.vocab)
        found: list[Drawn] = []
        while len(found) < count:
            wanted = count - len(found)
            seed = derived(self._config.seed, self._peer, "server", number, place, len(found))
            body = request(self._pushing.model, prompt, wanted, most, top_k, seed, self._policy.end)
            with counts.lock:
                counts.requests += 1
            reply = self._client.post("/v1/completions", body, until, reply_bytes(wanted, most))
            found += completions(reply, self._words, most)[:wanted]
        return found
