"""The settings of a group: the arguments of ``host``, ``wrap`` and ``shard`` as a run's configuration."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from planaria.common.documents import first_error
from planaria.common.errors import UserError
from planaria.config.model_config import GROUP
from planaria.config.schema import RunConfig
from planaria.exchange.registry import make_exchange
from planaria.group.member_state import MemberState
from planaria.runtime.preparation.config_checks import check_shared_log

_ARGUMENTS = "(?:shared_log|standby_at|port|advertise|patience_s|orphan_s|lease_s|key|compress|robust|options)"
"""settings of a recipe that have the names of arguments of ``host`` and ``wrap``"""


@dataclass(frozen=True)
class GroupSettings:
    """Arguments of :func:`planaria.host`; a member that joins sets only ``patience_s`` and ``seed``."""

    name: str = "group"
    out: str = "runs"
    address: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    members: int = 1
    max_members: int = 64
    patience_s: float = 10.0
    step_timeout_s: float = 600.0
    seed: int = 0
    key: str = ""
    shared_log: str = ""
    standby_at: str = ""

    def check(self) -> None:
        """Raise UserError for the first invalid argument of ``host``."""
        if self.members < 1:
            raise UserError(f"host: members = {self.members}: use 1 or more")
        if self.max_members < self.members:
            raise UserError(f"host: max_members = {self.max_members} is less than members = {self.members}")
        if self.address in ("0.0.0.0", "::") and not self.advertise:
            raise UserError(f"host: address = {self.address!r}: set advertise to the address or name that others use")
        own = f"{self.advertise or self.address}:{self.port}"
        listed = [at.strip() for at in self.standby_at.split(",") if at.strip()]
        if listed and not self.shared_log:
            raise UserError("host: standby_at needs shared_log, from which another machine continues")
        if self.shared_log and own not in listed:
            raise UserError(f"host: standby_at = {listed}: list this machine too, as {own!r} (its address and port)")


@dataclass(frozen=True)
class ExchangeSettings:
    """Arguments of :meth:`planaria.group.group.Group.wrap` about the exchange."""

    kind: str = "noloco"
    compress: str = ""
    robust: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SharedData:
    """The data that members share, in blocks; each is computed by one member."""

    blocks: int
    """blocks in all"""
    block_samples: int = 1
    """samples of a block"""
    samples: int = 0
    """samples of the data; 0: unknown"""


def group_config(host: GroupSettings, agreed: ExchangeSettings, data: SharedData, owned: MemberState) -> RunConfig:
    """Return the configuration of a group's controller.

    :raises UserError: for the first invalid setting.
    """
    one_gradient = agreed.kind == "allreduce"
    sections = {
        "name": host.name,
        "out": str(Path(host.out)),
        "seed": host.seed,
        "model": {"family": GROUP, "options": _model_options(owned, data), "context": 1},
        "pipeline": {"stages": 0, "microbatches": 1, "microbatch_size": data.block_samples, "wire": "fp32"},
        "train": {"steps": math.ceil(data.blocks / host.members), "eval_every": 0},
        "recovery": {"strategy": "checkpoint", "meanwhile": "skip" if one_gradient else "wait"},
        "exchange": _exchange_section(host, agreed, one_gradient),
        "fleet": _fleet_section(host),
        "checkpoint": {"every": 0},
        "observe": {"trackers": ""},
    }
    try:
        config = RunConfig.model_validate(sections)
        if config.fleet.shared_log is not None:
            check_shared_log(config)
    except ValidationError as error:
        raise UserError(f"group: {as_arguments(first_error(error))}") from None
    except UserError as error:
        raise UserError(f"group: {as_arguments(str(error))}") from None
    if make_exchange(config.exchange).decoupled:
        raise UserError(
            f"group: exchange = {agreed.kind!r} needs weights that change only between steps, and a loop's optimizer "
            "changes them within; use 'streaming_diloco'"
        )
    return config


def as_arguments(text: str) -> str:
    """Return an error with the names of ``host``'s arguments instead of a recipe's settings.

    >>> as_arguments("fleet.port = 80: use another --name, or fleet.host")
    'port = 80: use another name, or address'
    """
    named = text.replace("fleet.host", "address").replace("--name", "name")
    return re.sub(rf"(?<![\w./~-])(?:fleet|exchange)\.(?={_ARGUMENTS}\b)", "", named)


def _model_options(owned: MemberState, data: SharedData) -> dict[str, Any]:
    return {
        "numbers": owned.parameter_count,
        "tensors": len(owned.parameters),
        "layout": owned.layout,
        "optimizer": owned.optimizer_kind,
        "state_bytes": owned.max_state_bytes,
        "blocks": data.blocks,
        "samples": data.samples,
    }


def _exchange_section(host: GroupSettings, agreed: ExchangeSettings, one_gradient: bool) -> dict[str, Any]:
    """``one_gradient``: members share the gradient of each step, so their number is fixed."""
    limit = {} if one_gradient else {"max_replicas": max(2, host.members, host.max_members)}
    return {
        "kind": agreed.kind,
        "options": agreed.options,
        "compress": agreed.compress,
        "robust": agreed.robust,
        "patience_s": host.patience_s,
        "replicas": host.members,
        **limit,
    }


def _fleet_section(host: GroupSettings) -> dict[str, Any]:
    shared = {"key": host.key, "shared_log": host.shared_log, "standby_at": host.standby_at}
    return (shared if host.shared_log else {}) | {
        "local_workers": 0,
        "spares": 0,
        "replace": False,
        "host": host.address,
        "port": host.port,
        "advertise": host.advertise,
        "join_s": max(60.0, host.patience_s),
        "timeout_s": host.step_timeout_s,
        "heartbeat_s": 0.5,
        "missed_heartbeats": 8,
        "diagnose": "report",
    }
