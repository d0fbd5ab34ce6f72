"""Completions from a server: bounded staleness of its weights, pushing new ones, and fallback to the policy.

The peer's policy learns. A server draws with the weights it loaded last, which may be
``policy.max_staleness_rounds`` rounds old; the loss corrects for that by the server's log-probabilities
(:mod:`planaria.swarm.learning.loss`, F-TIS). With ``rounds.ahead``, it draws each round with exactly the version that
:func:`planaria.swarm.learning.weight_versions.drawing_round` names. If the weights would be older, or the server does
    not reply within ``policy.serving.timeout_s``, the policy draws. New weights are written to a shared folder,
    followed by a request to load them (:class:`WeightPublisher`).
"""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from planaria.common.errors import UserError
from planaria.config.names import expand_home
from planaria.swarm.completions.client import (
    BadReply,
    Client,
    ServerFailed,
    max_reply_bytes,
    parse_completions,
    request_body,
)
from planaria.swarm.config.policy_config import PolicyConfig
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.learning.weight_versions import drawing_round
from planaria.swarm.peer.random_draws import derive_seed
from planaria.swarm.policy.base import Exportable, Policy, SampledCompletion
from planaria.swarm.records.lines import Serving

NEVER = -(1 << 32)
"""round of weights that are not known"""
MAX_BACKOFF_ROUNDS = 16
"""maximum number of rounds without requests after repeated failures"""


@dataclass
class Backoff:
    """Backoff after failures: one round, then two, four, …"""

    failures: int = 0
    until: int = 0

    def record_failure(self, number: int) -> None:
        self.failures += 1
        self.until = number + min(MAX_BACKOFF_ROUNDS, 2 ** (self.failures - 1))

    def reset(self) -> None:
        self.failures = 0


class RemoteSampler:
    """One peer's server and the age of its weights."""

    def __init__(self, config: SwarmConfig, policy: Policy, folder: Path, peer: str) -> None:
        """:raises UserError: if the server cannot be reached, or a setting is invalid."""
        self._config = config
        self.policy = policy
        """the weights to draw with"""
        self._peer = peer
        self._client = Client(config.policy)
        model = self._client.model(config.policy.serving.model)
        self._publisher = WeightPublisher(config.policy, policy, folder, model, peer)
        self._first, self._server_round, self._backoff = 0, 0, Backoff()
        self.last_stats = Serving()
        """statistics of the last round"""

    def start_at(self, first: int) -> None:
        """Start at round ``first``, in which the server's weights are still the policy's."""
        self._first = self._server_round = first

    def force_push(self) -> None:
        """Push weights again before the next draw: the peer returned to an earlier round."""
        self._server_round = NEVER

    def draw(self, number: int, prompts: Sequence[Sequence[int]], count: int) -> list[list[SampledCompletion]] | None:
        """Return ``count`` completions per prompt for round ``number``, or None if the policy must draw them.

        :attr:`last_stats` holds statistics and the reason.
        """
        if number < self._backoff.until:
            self.last_stats = Serving(local=f"the server failed; next request in round {self._backoff.until}")
            return None
        began, until = time.monotonic(), time.monotonic() + self._config.policy.serving.timeout_s
        ahead = self._config.rounds.ahead
        version = drawing_round(number, ahead, self._first)
        unpushed = self._push(version, until)
        behind, limit = number - self._server_round, ahead or self._config.policy.max_staleness_rounds
        if behind > limit:
            key = "rounds.ahead" if ahead else "policy.max_staleness_rounds"
            local = f"its weights are {behind} rounds old; the limit is {limit} ({key})"
            self.last_stats = Serving(behind=behind, unpushed=unpushed, local=local)
            return None
        requests, drew = itertools.count(), time.monotonic()

        def draw(index: int) -> list[SampledCompletion]:
            return self._draw_one(number, index, prompts[index], count, until, requests)

        at_once = min(self._config.policy.serving.at_once, len(prompts))
        try:
            with ThreadPoolExecutor(max(1, at_once), thread_name_prefix="planaria-server") as pool:
                drawn = list(pool.map(draw, range(len(prompts))))  # a failure cancels pending requests
        except (ServerFailed, BadReply) as error:
            self._backoff.record_failure(number)
            seconds = time.monotonic() - began
            self.last_stats = Serving(seconds=seconds, requests=next(requests), unpushed=unpushed, local=str(error))
            return None
        self._backoff.reset()
        flat = [completion for group in drawn for completion in group]
        self.last_stats = Serving(
            tokens=sum(len(completion.ids) + completion.ended for completion in flat),
            seconds=time.monotonic() - drew,
            requests=next(requests),
            queue=len(prompts) - at_once,
            behind=behind,
            claimed=sum(bool(completion.logps) for completion in flat) / max(1, len(flat)),
            unpushed=unpushed,
        )
        return drawn

    def _push(self, number: int, until: float) -> str:
        """Push this round's weights unless the server has them; return why that failed."""
        if self._server_round == number or self._publisher.push_failure:
            return self._publisher.push_failure if self._server_round != number else ""
        try:
            self._publisher.push(self._client, number, until)
        except ServerFailed as error:
            return str(error)
        self._server_round = number
        return ""

    def _draw_one(
        self, number: int, index: int, prompt: Sequence[int], count: int, until: float, requests: Iterator[int]
    ) -> list[SampledCompletion]:
        """Draw for one prompt; repeat the request if the server returns fewer completions."""
        sampling = self._config.sampling
        limit = min(sampling.max_new, self.policy.context - len(prompt))
        top_k = sampling.support(self.policy.vocab)
        result: list[SampledCompletion] = []
        while len(result) < count:
            wanted = count - len(result)
            seed = derive_seed(self._config.seed, self._peer, "server", number, index, len(result))
            body = request_body(self._publisher.model, prompt, wanted, limit, top_k, seed, self.policy.end)
            next(requests)  # counts, atomically
            reply = self._client.post("/v1/completions", body, until, max_reply_bytes(wanted, limit))
            result += parse_completions(reply, self.policy, limit)[:wanted]
        return result


UNSUPPORTED_STATUSES = (400, 403, 404, 405, 422, 501)
"""HTTP statuses of servers that cannot load weights while running"""
KEPT_VERSIONS = 2
"""versions on disk: the current one and the previous one"""


@runtime_checkable
class Adapters(Protocol):
    """A policy that trains adapters."""

    @property
    def adapted(self) -> bool:
        """Whether it trains adapters."""

    def save_adapters(self, folder: Path, base: str) -> None:
        """Save them in ``peft``'s format for the model ``base``; OSError if that fails."""


class WeightPublisher:
    """Publishes versions of a policy to a server."""

    def __init__(self, config: PolicyConfig, policy: Policy, folder: Path, model: str, peer: str) -> None:
        """:raises UserError: if the policy cannot provide what is to be pushed."""
        self._policy = policy
        self._base = model
        self._peer = re.sub(r"[^A-Za-z0-9]", "", peer)
        self._folder = expand_home(config.serving.folder) if config.serving.folder else folder
        adapted = isinstance(policy, Adapters) and policy.adapted
        push = config.serving.push
        self.kind = ("adapters" if adapted else "weights") if push == "auto" else push
        if self.kind == "adapters" and not adapted:
            raise UserError(
                "policy.serving.push = 'adapters': no adapters are trained; set policy.options.lora, or use 'auto'"
            )
        if self.kind == "weights" and not isinstance(policy, Exportable):
            raise UserError(f"policy.serving.push: {type(policy).__name__} cannot be exported; use 'never'")
        self.model = model
        """name of the newest version on the server"""
        self.push_failure = "" if self.kind != "never" else "policy.serving.push = 'never'"
        """why weights can never be pushed; empty if they can"""

    def push(self, client: Client, number: int, until: float) -> None:
        """Make the server load the policy's weights before round ``number``.

        :raises ServerFailed: if that fails; :attr:`push_failure` is set if it cannot succeed later.
        """
        name = f"planaria-{self._peer}-{number:06d}"
        path = (self._folder / name).absolute()
        shutil.rmtree(path, ignore_errors=True)  # left by this peer before a restart
        try:
            if self.kind == "adapters":
                assert isinstance(self._policy, Adapters)
                self._policy.save_adapters(path, self._base)
            else:
                assert isinstance(self._policy, Exportable)
                self._policy.export(path)
        except (OSError, UserError) as error:
            raise ServerFailed(f"the weights of round {number} could not be written ({error})") from None
        try:
            self.model = self._load(client, name, str(path), until)
        except ServerFailed as error:
            shutil.rmtree(path, ignore_errors=True)
            if error.status in UNSUPPORTED_STATUSES:
                self.push_failure = str(error)
            raise
        for old in sorted(self._folder.glob(f"planaria-{self._peer}-*"))[:-KEPT_VERSIONS]:
            shutil.rmtree(old, ignore_errors=True)

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
        self._unload_previous(client, prefix, until)
        return requested

    def _unload_previous(self, client: Client, prefix: str, until: float) -> None:
        before = self.model.removeprefix(f"{self._base}:")
        if self.model != self._base and time.monotonic() < until:
            with suppress(ServerFailed):  # the server may have unloaded it already
                client.post(f"{prefix}/unload_lora_adapter", {"lora_name": before}, until)
