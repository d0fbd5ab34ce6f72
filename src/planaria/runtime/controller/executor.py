"""Carry out decisions: orders to workers and state transfers, and checkpoint folders."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from planaria.common.atomic import write_error
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.decisions import state_link
from planaria.control.facts.orders import Donate, ExitWorker, Order
from planaria.control.state.run import RunState
from planaria.exchange.coded.coded_facts import CloseRound
from planaria.runtime.checkpoint.store import MANIFEST, CheckpointStore
from planaria.runtime.controller.manifest import manifest_of, saved_generations
from planaria.runtime.fleet.base import Elastic


class DecisionExecutor:
    """Carries out decisions at a fleet and a checkpoint store; ``state`` is the run's state after the decision."""

    def __init__(self, config: RunConfig, fleet: Elastic, store: CheckpointStore) -> None:
        self._config, self._fleet, self._store = config, fleet, store

    def carry_out(self, decision: d.Decision, state: RunState) -> e.SaveFailed | None:
        """Carry out a decision; return the failure if it seals a checkpoint that cannot be sealed."""
        match decision:
            case d.Spawn():
                self._fleet.spawn(decision.worker, decision.incarnation, decision.host)
            case d.Release():
                self.order(ExitWorker(), [decision.worker])
            case d.RemoveMachine():
                self._fleet.remove_machine(decision.host, decision.reason)
            case d.Form() | d.RunStep() | d.Commit() | d.Save():
                if isinstance(decision, d.Save):
                    self._create_checkpoint_folders(decision, state)
                self.order(decision, state.replicas[decision.replica].waiting)
                if isinstance(decision, d.Form):
                    self._order_transfers(decision, state)
            case d.LeaveOut() | CloseRound():
                self.order(decision, state.replicas[decision.replica].holders.values())
            case d.OpenPrefetchLinks() | d.BeginRound() | d.Settle():
                for number in decision.members:
                    self.order(decision, state.replicas[number].holders.values())
            case d.Disband():
                self.order(decision, decision.workers)
            case d.ExcludeMember():
                for worker in decision.workers:
                    self._fleet.signal(worker, state.workers[worker].incarnation, signal.SIGKILL)
            case d.Seal():
                return self._seal(decision, state)
            case d.Discard():
                self._store.discard_unfinished(decision.step)
            case d.Finish():
                self.order(ExitWorker(), [w for w, s in state.workers.items() if s.status != "dead"])
        return None

    def order(self, order: Order, workers: Iterable[str]) -> None:
        """Send an order to these workers."""
        text = order.model_dump_json().encode()
        for worker in workers:
            self._fleet.send(worker, text)

    def _order_transfers(self, form: d.Form, state: RunState) -> None:
        """Order workers of another replica, or leaving ones, to transfer their stages. Each has all earlier orders."""
        holders = state.holders
        for member in form.members:
            if isinstance(member.source, d.Handover):
                link = state_link(form.generation, d.PREDECESSOR, member.node)
                order = Donate(donor=d.PREDECESSOR, to=member.node, stage=member.stage, link=link, at=member.at)
                self.order(order, [member.source.worker])
            for donor in member.source.donors if isinstance(member.source, d.Rebuild) else ():
                if donor in state.replicas[form.replica].donor_workers:
                    link = state_link(form.generation, donor, member.node)
                    order = Donate(
                        donor=donor, to=member.node, stage=member.stage, link=link, at=member.at,
                        only_outer=isinstance(member.source, d.CatchUp),
                    )  # fmt: skip
                    self.order(order, [holders[donor]])

    def _create_checkpoint_folders(self, save: d.Save, state: RunState) -> None:
        """Create the folders for the files of a checkpoint."""
        settings = state.started
        for column in range(settings.lockstep_replicas) if settings.lockstep_replicas else [save.replica]:
            self._store.create_replica_folder(save.step, settings.saved_replicas, column, save.generation)

    def _seal(self, seal: d.Seal, state: RunState) -> e.SaveFailed | None:
        manifest = manifest_of(seal, state.started, self._config)
        try:
            self._store.seal(seal.folder, manifest, self._config.checkpoint.keep, saved_generations(state))
        except OSError as error:
            detail = write_error(self._store.folder / seal.folder / MANIFEST, error)
            fields = {"worker": e.CONTROLLER, "stage": -1, "generation": -1, "step": seal.step}
            return e.SaveFailed.model_validate(fields | {"detail": detail})
        return None
