"""Train your own model with others: ``planaria.host`` and ``planaria.join``.

You keep your loop, model and optimizer. The group assigns samples, exchanges weights or gradients, and sends the
current state to new members.
"""

from __future__ import annotations

import atexit
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from planaria.common.errors import RunStopped, UserError
from planaria.common.stdio import Notify
from planaria.group.entrance import START_S, GroupAccess, invitation, start_controller
from planaria.group.member_state import MemberState, Stateful
from planaria.group.membership import ConnectionLost, Membership, note, require_same
from planaria.group.optimizer import GroupOptimizer
from planaria.group.ranks import Follower, Ranks
from planaria.group.settings import ExchangeSettings, GroupSettings, SharedData, as_arguments, group_config
from planaria.group.shard import Blocks, Shard, blocks_of, mark_last
from planaria.models.group_family import group_family
from planaria.report.run.report import write_report
from planaria.runtime.engine.machine_service import MachineOptions, connect, setup_of
from planaria.runtime.fleet.joining import RunAddress, read_key, read_or_create_key
from planaria.runtime.transport.secure import new_key
from planaria.runtime.worker.setup import Setup

KEY = "~/.planaria/group.key"
"""file with the key that members prove to know"""


def host(
    port: int = 0,
    *,
    key: str | Path = KEY,
    name: str = "group",
    out: str | Path = "runs",
    address: str = "127.0.0.1",
    advertise: str = "",
    members: int = 1,
    max_members: int = 64,
    patience_s: float = 10.0,
    step_timeout_s: float = 600.0,
    seed: int = 0,
    shared_log: str | Path = "",
    standby_at: Sequence[str] | str = (),
    notify: Notify = print,
) -> Group:
    """Return a group with this process as its first member. Others can join once its loop draws the first batch.

    :param port: TCP port at which others join; 0: any free one.
    :param key: file with the group's key; created if it is missing. Others need a copy.
    :param name: name of the group's folder in ``out``, which holds its log and report.
    :param address: address of this machine at which the group's controller listens.
    :param advertise: name or address for other machines, if it differs.
    :param members: members that the first step waits for; with allreduce, the parts into which each step is divided.
    :param max_members: maximum number of members.
    :param patience_s: how long a round waits for its members, and the group for a new member if all are lost.
    :param step_timeout_s: longest time between two calls of the loop's optimizer; a slower member counts as stuck.
    :param seed: seed of the order of samples and of the groups that meet.
    :param shared_log: folder, bucket or holders ("quorum://…") of a log with which another machine can lead the group.
    :param standby_at: HOST:PORT of the machines that may lead, this one included.
    :param notify: called with lines that tell others how to join, and about lost controllers.
    :raises UserError: if an argument is invalid, or the key file cannot be used.
    """
    file = Path(key).expanduser()
    settings = GroupSettings(
        name=name,
        out=str(out),
        address=address,
        port=port,
        advertise=advertise,
        members=members,
        max_members=max_members,
        patience_s=patience_s,
        step_timeout_s=step_timeout_s,
        seed=seed,
        key=str(file.absolute()),
        shared_log=str(shared_log),
        standby_at=standby_at if isinstance(standby_at, str) else ", ".join(standby_at),
    )
    settings.check()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    key_bytes = read_or_create_key(file, new_key())
    return Group(key_bytes, settings, "", notify)


def join(address: str, *, key: str | Path = KEY, retry_s: float = 60.0, seed: int = 0, notify: Notify = print) -> Group:
    """Join a group.

    :param address: HOST:PORT of the group's controller.
    :param key: file with a copy of the group's key.
    :param retry_s: how long to try while nothing answers.
    :param seed: seed of the order of samples; must equal the host's.
    :param notify: called with a line if nothing answers at first, and about lost controllers.
    :raises UserError: if the key cannot be read.
    """
    if not re.fullmatch(r".+:[0-9]{1,5}", address):
        raise UserError(f"join: {address!r} is not an address; use HOST:PORT as printed by the host")
    return Group(read_key(Path(key).expanduser()), GroupSettings(patience_s=retry_s, seed=seed), address, notify)


class Group:
    """A group of processes that train the same model, and this process's membership in it."""

    def __init__(
        self,
        key: bytes,
        settings: GroupSettings,
        address: str,
        notify: Notify = print,
    ) -> None:
        """Set up a group without a connection.

        :param address: HOST:PORT of the controller; empty: this process starts it.
        """
        self._key = key
        self._settings = settings
        self.address = address
        self._notify = notify
        self._hosts = not address
        self.folder: Path | None = None
        """folder of the group's log and report, or None except at the host"""
        self._owned: MemberState | None = None
        self._agreed: ExchangeSettings | None = None
        self._data: SharedData | None = None
        self._ranks: Ranks | None = None
        self._member: Membership | Follower | None = None
        self._folder_id = ""
        """identifies the group, as opposed to a later one at the same address"""
        self._sharded = False
        self._mid_block = False
        """whether the current block has further batches"""
        self._current: int | None = None
        """block whose samples the owner has"""

    def wrap(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        exchange: str = "noloco",
        every: int | None = None,
        compress: str = "",
        robust: str = "",
        also: Mapping[str, Stateful] | None = None,
        **options: Any,
    ) -> GroupOptimizer:
        """Return the optimizer for the loop; the group runs when the loop calls its ``step``.

        :param exchange: how members agree: noloco, diloco, streaming_diloco, eager, pair_mean, gasloc, local or
            allreduce.
        :param every: steps of a member between two rounds; by default the exchange's own.
        :param compress: compression of messages, such as ``"ef21:top1%"``.
        :param robust: rule that outvotes invalid updates, such as ``"nnm:median"``.
        :param also: other objects whose state a new member needs, such as ``{"scheduler": scheduler}``.
        :param options: options of the exchange.
        :raises UserError: if the model and the optimizer do not fit together, or were wrapped before.
        """
        if self._owned is not None:
            raise UserError("wrap: this group already has an optimizer; make one group for each model")
        self._ranks = Ranks(model)
        if self._ranks.sharded and exchange == "allreduce":
            raise UserError(
                "wrap: exchange='allreduce' would gather a sharded model's gradient in every step; use an exchange "
                "with rounds, such as noloco or diloco"
            )
        self._owned = self._ranks.state_of(model, optimizer, also or {})
        if self._sharded and self._ranks.count > 1:
            raise UserError("wrap: call it before shard, which divides the data among the ranks of this model too")
        chosen = {**options, **({} if every is None else {"every": every})}
        self._agreed = ExchangeSettings(exchange, compress, robust, chosen)
        return GroupOptimizer(optimizer, self._step, lambda: self._mid_block)

    def shard(self, loader: Iterable[Any], *, epochs: int = 1, steps: int | None = None, accumulate: int = 1) -> Shard:
        """Return this member's batches: every sample of every epoch goes to one member, also when members come and go.

        :param epochs: passes over the data of all members together.
        :param steps: blocks of all members together, instead of ``epochs``; required for streams.
        :param accumulate: batches of a block, for each call of the optimizer's ``step``.
        :raises UserError: if the loader cannot be divided.
        """
        rank, ranks = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.count)
        self._sharded = True
        blocks = blocks_of(loader, accumulate, self._settings.seed, rank, ranks)
        count = steps if steps is not None else blocks.count(epochs)
        if not count:
            raise UserError("shard: a stream has no length; set steps")
        return Shard(self._batches, blocks, SharedData(count, blocks.block_samples, blocks.samples), accumulate)

    def _batches(self, blocks: Blocks, data: SharedData) -> Iterator[Any]:
        """Yield the batches of the blocks that the group assigns to this member.

        :raises UserError: if the data or a setting differs from the group's.
        :raises RunStopped: if this process is no longer a member.
        """
        if self._member is not None:
            raise UserError("shard: one loop over it is the whole training; set epochs to repeat the data")
        while (member := self._begin(data)).blocks:
            self._current = member.blocks[0]
            for last, batch in mark_last(blocks.batches(self._current)):
                self._mid_block = not last
                yield batch
            if self._current is not None:  # without a step the gradient stays with the owner
                self._skip(member)

    def _skip(self, member: Membership | Follower) -> None:
        """End a block without a step: the owner adds up gradients, or its gradient scaler met one that is not finite.

        :raises UserError: if the members share a gradient, to which this one must contribute.
        """
        assert self._owned is not None and self._agreed is not None
        if self._agreed.kind == "allreduce" and self._owned.has_gradient():
            raise UserError(
                "shard: with exchange='allreduce' every block needs optimizer.step(); to add up several batches, "
                "use shard(accumulate=...)"
            )
        self._proceed(member, updates=False)

    def _begin(self, data: SharedData) -> Membership | Follower:
        """Become a member with the first call."""
        if self._member is not None:
            return self._member
        if self._owned is None or self._ranks is None:
            raise UserError("shard: call wrap(optimizer, model) first")
        self._owned.require_sendable()  # fail now, not when a new member comes
        self._data = data
        if self._ranks.rank:
            self._member = Follower(self._ranks, self._owned)
        else:
            with self._ranks.lead():
                self._open()
                self._member = self._join()
            atexit.register(self.leave)
        self._advance()
        return self._member

    def _open(self) -> None:
        """Start the controller, if this process hosts."""
        assert self._owned is not None and self._agreed is not None and self._data is not None
        if self._hosts:
            config = group_config(self._settings, self._agreed, self._data, self._owned)
            try:
                self.address, self.folder = start_controller(config.model_dump_json(), self._key)
            except UserError as error:
                raise UserError(as_arguments(str(error))) from None
            for line in invitation(config, self.folder.name, self.address, self._settings.key):
                self._notify(line)

    def _join(self, again: bool = False) -> Membership:
        """Become a member, or become one ``again`` after the connection broke.

        :raises UserError: if the group rejects this process, or another setting.
        :raises RunStopped: if the group does not answer in time, or another one answers.
        """
        assert self._owned is not None and self._data is not None
        patience_s = self._settings.patience_s
        known = RunAddress(at=self.address, key=self._key.hex())
        access = GroupAccess(self.address, Path(), known, patience_s)
        notify = note if again else self._notify
        membership = connect(access, MachineOptions(1, patience_s, patience_s), notify, again)
        assert membership is not None
        with ExitStack() as cleanup:
            cleanup.callback(membership.end)
            setup = setup_of(membership)
            if again and setup.folder_id != self._folder_id:
                raise RunStopped(
                    f"{self.address}: another group, without this one's weights, uses this address now; start again"
                )
            self._folder_id = setup.folder_id
            setup = replace(setup, folder_id="")
            require_same(setup, self._owned)
            self._require_agreed(setup, self._data)
            member = Membership(membership, setup, self._owned, START_S, self._notify)
            cleanup.pop_all()
        return member

    def _require_agreed(self, setup: Setup, data: SharedData) -> None:
        """Raise UserError for the first setting in which this process differs from the group."""
        config, agreed = setup.config, self._agreed
        assert agreed is not None
        theirs = config.exchange
        family = group_family(config.model)
        rows = [
            ("wrap: exchange", agreed.kind, theirs.kind),
            ("wrap: options", dict(agreed.options), dict(theirs.options)),
            ("wrap: compress", agreed.compress, theirs.compress),
            ("wrap: robust", agreed.robust, theirs.robust),
            ("shard: batch_size × accumulate × ranks", data.block_samples, config.pipeline.microbatch_size),
            ("shard: number of samples", data.samples, family.samples),
            ("shard: epochs or steps: blocks", data.blocks, family.blocks),
            ("seed", self._settings.seed, config.seed),
        ]
        for setting, own, in_group in rows:
            if own != in_group:
                raise UserError(f"{setting} is {own!r} here and {in_group!r} in the group; use the same")

    def _step(self) -> None:
        """Pass the gradient of the current block to the group."""
        member = self._member
        if member is None or self._current is None:
            raise UserError("optimizer.step: this member has no samples; call it in the loop over group.shard(loader)")
        self._proceed(member, updates=True)

    def _proceed(self, member: Membership | Follower, updates: bool) -> None:
        assert self._current is not None
        member.take_gradient(self._current, updates)
        self._current = None
        self._advance()

    def _advance(self) -> None:
        """Let the group proceed, and all ranks of this member with it.

        :raises RunStopped: if this process was dismissed, or the group does not answer in time.
        """
        member = self._member
        if isinstance(member, Follower):
            member.advance()
            return
        assert member is not None and self._owned is not None and self._ranks is not None
        with self._ranks.lead():
            self._member = member = self._wait_for_gradient(member)
        self._ranks.proceed(member, self._owned)

    def _wait_for_gradient(self, member: Membership) -> Membership:
        """Return the membership once it waits for a gradient: a new one, with a peer's state, if the old one broke."""
        until = None
        while True:
            try:
                if until is not None:
                    self.address = member.address
                    before, member = member.runner, self._join(again=True)
                    member.runner.steps, member.runner.progress = before.steps, before.progress
                member.advance()
                return member
            except ConnectionLost as error:
                until = until or time.monotonic() + self._settings.patience_s
                if time.monotonic() > until:
                    raise
                self._notify(f"{error}: trying for {self._settings.patience_s:g} s")

    def log(self, loss: float) -> None:
        """Report the loss of the current step for the live page and the report."""
        if self._member is not None:
            self._member.report(float(loss))

    def report(self, to: str | Path | None = None) -> Path:
        """Write the group's report, one HTML page that works offline, and return its path (default: in its folder).

        :raises UserError: if this process is not the host, whose folder has the log, or the file cannot be written.
        """
        if self.folder is None:
            raise UserError("report: the log is in the host's folder; call it there once its loop has begun")
        return write_report(self.folder, None if to is None else Path(to))

    @property
    def steps(self) -> int:
        """Number of steps that this process has made."""
        return 0 if self._member is None else self._member.step

    @property
    def ended(self) -> bool:
        """Whether the group has used all samples, or this process has left it."""
        return self._member is not None and not self._member.blocks

    @property
    def progress(self) -> int:
        """Updates of all members up to this member's last one, for learning-rate schedules."""
        return 0 if self._member is None else self._member.progress

    @property
    def rounds(self) -> int:
        """Rounds of the exchange in this member's weights, those before it joined included."""
        return 0 if self._member is None else self._member.rounds

    def leave(self) -> None:
        """Leave the group; samples of an unfinished step go to another member. The call has no effect once it has
        ended.
        """
        atexit.unregister(self.leave)
        if self._member is not None:
            self._member.leave()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *failed: object) -> None:
        self.leave()
