"""Completions from a server: how far its weights may lag, how it gets new ones, and who draws if it fails.

The peer's policy is the one that learns. A server draws with the weights that it was given last; they may be
``policy.behind`` rounds old, and the loss corrects for that by the log-probabilities that the server reports
(:mod:`planaria.swarm.learning.loss`, F-TIS). If the weights would be older, or the server does not deliver in time, the
policy draws by itself: a round never waits for more than ``policy.serving.timeout_s``. New weights are written as files
that peer and server both see, followed by a request to load them (:class:`Pushing`).
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from planaria.common.errors import UserError
from planaria.config.names import expanded
from planaria.swarm.config import PolicyConfig, SwarmConfig
from planaria.swarm.draws import derived
from planaria.swarm.policy.base import Drawn, Exportable, Policy
from planaria.swarm.records.lines import Serving
from planaria.swarm.serving.client import BadReply, Client, ServerFailed, Words, completions, reply_bytes, request

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
        counts.waiting = max(0, len(prompts) - at_once)

        def draw(place: int) -> list[Drawn]:
            return self._draw_one(number, place, prompts[place], count, until, counts)

        with ThreadPoolExecutor(max(1, at_once), thread_name_prefix="planaria-server") as pool:
            return list(pool.map(draw, range(len(prompts))))  # a failure cancels the requests that have not begun

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


UNABLE = (400, 403, 404, 405, 422, 501)
"""statuses of a server that cannot load anything while it runs, however often it is asked"""
KEPT = 2
"""versions that stay on disk: the one that is drawn from, and the one before"""


@runtime_checkable
class Adapters(Protocol):
    """A policy whose trained part is a small file of its own."""

    @property
    def adapted(self) -> bool:
        """Whether adapters are what it trains."""

    def save_adapters(self, folder: Path, base: str) -> None:
        """Write them in ``peft``'s form; ``base`` names the model beneath. OSError when that cannot be."""


class Pushing:
    """Puts versions of one policy where a server finds them."""

    def __init__(self, config: PolicyConfig, policy: Policy, folder: Path, model: str, peer: str) -> None:
        """:raises UserError: when the policy has not what is to be pushed."""
        self._policy, self._base, self._peer = policy, model, re.sub(r"[^A-Za-z0-9]", "", peer)
        self._folder = expanded(config.serving.folder) if config.serving.folder else folder
        adapted = isinstance(policy, Adapters) and policy.adapted
        push = config.serving.push
        self.kind = ("adapters" if adapted else "weights") if push == "auto" else push
        if self.kind == "adapters" and not adapted:
            raise UserError(
                "policy.serving.push = 'adapters': none are trained; set policy.options.lora, or write 'auto'"
            )
        if self.kind == "weights" and not isinstance(policy, Exportable):
            raise UserError(f"policy.serving.push: {type(policy).__name__} cannot be exported; write 'never'")
        self.model = model
        """the name under which the server has the newest version"""
        self.unable = "" if self.kind != "never" else "policy.serving.push = 'never'"
        """why the server gets no versions any more; empty while it does"""

    def push(self, client: Client, number: int, until: float) -> None:
        """Have the server load the weights that the policy has before round ``number``.

        :raises ServerFailed: when it does not, or nothing could be written; :attr:`unable` then says whether it can be
            asked again.
        """
        name = f"planaria-{self._peer}-{number:06d}"
        place = (self._folder / name).absolute()
        shutil.rmtree(place, ignore_errors=True)  # of this peer, before it was started again
        try:
            self._write(place)
        except (OSError, UserError) as error:
            raise ServerFailed(f"the weights of round {number} could not be written ({error})") from None
        try:
            self.model = self._load(client, name, str(place), until)
        except ServerFailed as error:
            shutil.rmtree(place, ignore_errors=True)
            if error.status in UNABLE:
                self.unable = str(error)
            raise
        for old in sorted(self._folder.glob(f"planaria-{self._peer}-*"))[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def _write(self, place: Path) -> None:
        if self.kind == "adapters":
            assert isinstance(self._policy, Adapters)
            self._policy.save_adapters(place, self._base)
        else:
            assert isinstance(self._policy, Exportable)
            self._policy.export(place)

    def _load(self, client: Client, name: str, place: str, until: float) -> str:
        """Ask for it; the name by which it is drawn from."""
        if self.kind == "weights":
            found = client.post("/update_weights_from_disk", {"model_path": place}, until)
            if isinstance(found, dict) and found.get("success") is False:
                raise ServerFailed(f"the server could not load {place}")
            return self._base
        body = {"lora_name": name, "lora_path": place}
        try:
            client.post("/v1/load_lora_adapter", body, until)  # vLLM
            asked, prefix = name, "/v1"
        except ServerFailed as error:
            if error.status not in (404, 405):
                raise
            client.post("/load_lora_adapter", body, until)  # SGLang
            asked, prefix = f"{self._base}:{name}", ""
        self._forget(client, prefix, until)
        return asked

    def _forget(self, client: Client, prefix: str, until: float) -> None:
        """Free the room of the version before: a server holds few."""
        before = self.model.removeprefix(f"{self._base}:")
        if self.model != self._base and time.monotonic() < until:
            body: Mapping[str, str] = {"lora_name": before}
            try:
                client.post(f"{prefix}/unload_lora_adapter", body, until)
            except ServerFailed:
                return  # it dropped that by itself
