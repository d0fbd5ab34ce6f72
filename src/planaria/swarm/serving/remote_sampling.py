"""Completions from a server: bounded staleness of its weights, pushing new ones, and fallback to the policy.

The peer's policy learns. A server draws with the weights it loaded last, which may be
``policy.max_staleness_rounds`` rounds old; the loss corrects for that by the server's log-probabilities
(:mod:`planaria.swarm.learning.loss`, F-TIS). With ``rounds.ahead``, it draws each round with exactly the version that
:func:`planaria.swarm.learning.weight_versions.drawing_round` names. If the weights would be older, or the server does
not reply within ``policy.serving.timeout_s``, the policy draws. New weights are written to a folder that both see,
followed by a request to load them (:class:`Pushing`).
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
from planaria.swarm.config.policy import PolicyConfig
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.learning.weight_versions import drawing_round
from planaria.swarm.peer.random_draws import derived
from planaria.swarm.policy.base import Exportable, Policy, SampledCompletion
from planaria.swarm.records.lines import Serving
from planaria.swarm.serving.client import BadReply, Client, RemoteText, ServerFailed, completions, reply_bytes, request

NEVER = -(1 << 32)
"""round of weights that are not known"""
MAX_REST = 16
"""maximum number of rounds without requests after repeated failures"""


@dataclass
class Rest:
    """Backoff after failures: one round, then two, four, …"""

    failures: int = 0
    until: int = 0

    def failed(self, number: int) -> None:
        self.failures += 1
        self.until = number + min(MAX_REST, 2 ** (self.failures - 1))

    def worked(self) -> None:
        self.failures = 0


@dataclass
class _Count:
    """Counters shared by threads."""

    requests: int = 0
    waiting: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class PeerServer:
    """One peer's server and the age of its weights."""

    def __init__(self, config: SwarmConfig, policy: Policy, folder: Path, peer: str) -> None:
        """:raises UserError: if the server cannot be reached, or a setting is invalid."""
        self._config = config
        self.policy = policy
        """the weights to draw with"""
        self._peer = peer
        self._client = Client(config.policy)
        model = self._client.model(config.policy.serving.model)
        self._pushing = Pushing(config.policy, policy, folder, model, peer)
        self._words = RemoteText(policy.encode, policy.decode, policy.vocab, policy.end)
        self._first, self._held, self._rest = 0, 0, Rest()
        self.found = Serving()
        """statistics of the last round"""

    def begin(self, first: int) -> None:
        """Start at round ``first``, in which the server's weights are still the policy's."""
        self._first = self._held = first

    def forget(self) -> None:
        """Push weights again before the next draw: the peer returned to an earlier round."""
        self._held = NEVER

    def draw(self, number: int, prompts: Sequence[Sequence[int]], count: int) -> list[list[SampledCompletion]] | None:
        """Return ``count`` completions per prompt for round ``number``; None if the policy must draw them.

        :attr:`found` holds statistics and the reason.
        """
        if number < self._rest.until:
            self.found = Serving(local=f"the server failed; next request in round {self._rest.until}")
            return None
        began, until = time.monotonic(), time.monotonic() + self._config.policy.serving.timeout_s
        ahead = self._config.rounds.ahead
        version = drawing_round(number, ahead, self._first)
        unpushed = self._push(version, until)
        behind, most = number - self._held, ahead or self._config.policy.max_staleness_rounds
        if behind > most:
            key = "rounds.ahead" if ahead else "policy.max_staleness_rounds"
            local = f"its weights are {behind} rounds old; the limit is {most} ({key})"
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
        flat = [completion for group in drawn for completion in group]
        self.found = Serving(
            tokens=sum(len(completion.ids) + completion.ended for completion in flat),
            seconds=time.monotonic() - drew,
            requests=counts.requests,
            queue=counts.waiting,
            behind=behind,
            claimed=sum(bool(completion.logps) for completion in flat) / max(1, len(flat)),
            unpushed=unpushed,
        )
        return drawn

    def _push(self, number: int, until: float) -> str:
        """Push this round's weights unless the server has them; return why that failed."""
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
    ) -> list[list[SampledCompletion]]:
        """Draw for every prompt, with the recipe's number of concurrent requests."""
        at_once = min(self._config.policy.serving.at_once, len(prompts))
        counts.waiting = max(0, len(prompts) - at_once)

        def draw(index: int) -> list[SampledCompletion]:
            return self._draw_one(number, index, prompts[index], count, until, counts)

        with ThreadPoolExecutor(max(1, at_once), thread_name_prefix="planaria-server") as pool:
            return list(pool.map(draw, range(len(prompts))))  # a failure cancels pending requests

    def _draw_one(
        self, number: int, index: int, prompt: Sequence[int], count: int, until: float, counts: _Count
    ) -> list[SampledCompletion]:
        """Draw for one prompt; repeat the request if the server returns fewer completions."""
        sampling = self._config.sampling
        most = min(sampling.max_new, self.policy.context - len(prompt))
        top_k = sampling.support(self.policy.vocab)
        result: list[SampledCompletion] = []
        while len(result) < count:
            wanted = count - len(result)
            seed = derived(self._config.seed, self._peer, "server", number, index, len(result))
            body = request(self._pushing.model, prompt, wanted, most, top_k, seed, self.policy.end)
            with counts.lock:
                counts.requests += 1
            reply = self._client.post("/v1/completions", body, until, reply_bytes(wanted, most))
            result += completions(reply, self._words, most)[:wanted]
        return result


UNABLE = (400, 403, 404, 405, 422, 501)
"""statuses that mean that the server can never load weights while running"""
KEPT = 2
"""versions on disk: the current one and the previous one"""


@runtime_checkable
class Adapters(Protocol):
    """A policy that trains adapters."""

    @property
    def adapted(self) -> bool:
        """Whether it trains adapters."""

    def save_adapters(self, folder: Path, base: str) -> None:
        """Save them in ``peft``'s format for the model ``base``; OSError if that fails."""


class Pushing:
    """Publishes versions of a policy to a server."""

    def __init__(self, config: PolicyConfig, policy: Policy, folder: Path, model: str, peer: str) -> None:
        """:raises UserError: if the policy cannot provide what is to be pushed."""
        self._policy = policy
        self._base = model
        self._peer = re.sub(r"[^A-Za-z0-9]", "", peer)
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
        """name of the newest version on the server"""
        self.unable = "" if self.kind != "never" else "policy.serving.push = 'never'"
        """permanent reason why the server gets no versions; empty while it does"""

    def push(self, client: Client, number: int, until: float) -> None:
        """Make the server load the policy's weights before round ``number``.

        :raises ServerFailed: if that fails; :attr:`unable` is set if it cannot succeed later.
        """
        name = f"planaria-{self._peer}-{number:06d}"
        path = (self._folder / name).absolute()
        shutil.rmtree(path, ignore_errors=True)  # left by this peer before a restart
        try:
            self._write(path)
        except (OSError, UserError) as error:
            raise ServerFailed(f"the weights of round {number} could not be written ({error})") from None
        try:
            self.model = self._load(client, name, str(path), until)
        except ServerFailed as error:
            shutil.rmtree(path, ignore_errors=True)
            if error.status in UNABLE:
                self.unable = str(error)
            raise
        for old in sorted(self._folder.glob(f"planaria-{self._peer}-*"))[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def _write(self, path: Path) -> None:
        if self.kind == "adapters":
            assert isinstance(self._policy, Adapters)
            self._policy.save_adapters(path, self._base)
        else:
            assert isinstance(self._policy, Exportable)
            self._policy.export(path)

    def _load(self, client: Client, name: str, location: str, until: float) -> str:
        """Load a version; return the model name for requests."""
        if self.kind == "weights":
            result = client.post("/update_weights_from_disk", {"model_path": location}, until)
            if isinstance(result, dict) and result.get("success") is False:
                raise ServerFailed(f"the server could not load {location}")
            return self._base
        body = {"lora_name": name, "lora_path": location}
        try:
            client.post("/v1/load_lora_adapter", body, until)  # vLLM
            requested, prefix = name, "/v1"
        except ServerFailed as error:
            if error.status not in (404, 405):
                raise
            client.post("/load_lora_adapter", body, until)  # SGLang
            requested, prefix = f"{self._base}:{name}", ""
        self._forget(client, prefix, until)
        return requested

    def _forget(self, client: Client, prefix: str, until: float) -> None:
        """Unload the previous version to free its slot."""
        before = self.model.removeprefix(f"{self._base}:")
        if self.model != self._base and time.monotonic() < until:
            body: Mapping[str, str] = {"lora_name": before}
            try:
                client.post(f"{prefix}/unload_lora_adapter", body, until)
            except ServerFailed:
                return  # the server has already unloaded it
