"""How a server gets the weights that a policy has learned: as files that both can see, and a request to load them."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from planaria.common.errors import UserError
from planaria.config.names import expanded
from planaria.swarm.config import PolicyConfig
from planaria.swarm.policy.base import Exportable, Policy
from planaria.swarm.serving.client import Client, ServerFailed

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
