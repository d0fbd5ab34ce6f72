"""Replicas that send 1 % of each step's gradient: messages, losses and estimates, through kills, resumptions and a
machine that joins and leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.exchange.registry import make_exchange
from planaria.faults.trace import Fault
from planaria.models.families import build_stage
from planaria.models.optimizers.adamw import KEYS
from planaria.models.state import StageState
from planaria.runtime.checkpoint.loading import load_stage
from planaria.runtime.checkpoint.stage_file import read_stage
from planaria.runtime.checkpoint.store import MANIFEST, CheckpointStore, SealedCheckpoint
from support.live.harness import (
    ending,
    facts,
    folder_of,
    inline_losses,
    inline_too,
    live,
    losses,
    newest,
    pids,
    resume,
    tiny,
    train,
)
from support.live.joined_machines import FOREVER, PACE, holders, joined_machine, since, stopped

ECONTROL = "econtrol:top1%"
STAGES = 2
"""of each replica: the ends and a block stage"""


def lively(folder: Path, replicas: int, steps: int, spec: str = ECONTROL, **sections: dict[str, Any]) -> RunConfig:
    """Save every step and keep all checkpoints."""
    fields: dict[str, dict[str, Any]] = {
        "exchange": {"replicas": replicas, "compress": spec},
        "checkpoint": {"every": 1, "keep": 1000},
        "fleet": {"spares": 2, "missed_heartbeats": 40},
    }
    return tiny(folder, stages=STAGES - 1, steps=steps, **{**fields, **sections})


def kill(step: int, node: int, moment: str = "any", offset: float = 0.0) -> Fault:
    return Fault.model_validate({"step": step, "stage": node, "moment": moment, "offset": offset})


def part(outer: Mapping[str, Tensor], name: str) -> Tensor:
    """A part of an outer state as one vector; empty if there is none."""
    held = [tensor.reshape(-1) for key, tensor in sorted(outer.items()) if key.startswith(f"{name}/")]
    return torch.cat([*held, torch.empty(0)]).double()


def outer_of(saved: SealedCheckpoint, config: RunConfig, stage: int) -> list[Mapping[str, Tensor]]:
    """Return the outer state of each replica of a stage, in a run resumed with ``config``."""
    return [load_stage(saved.folder, config, stage, replica).outer for replica in range(config.exchange.replicas)]


def apart_from_mean(saved: SealedCheckpoint, config: RunConfig, stage: int) -> float | None:
    """Return ‖h̄ − mean hᵢ‖ / ‖h̄‖ of the saved replicas, or None where all restart their estimates."""
    held = outer_of(saved, config.model_copy(update={"exchange": saved.manifest.exchange}), stage)
    first, *others = [part(outer, "mean_estimate") for outer in held]
    assert len(first) and all(torch.equal(first, other) for other in others), "the same at all, to the last bit"
    own = [part(outer, "estimate") for outer in held]
    if not any(len(estimate) for estimate in own):
        return None
    return float((first - torch.stack(own).mean(0)).norm() / first.norm())


def residual(saved: SealedCheckpoint, config: RunConfig, stage: int) -> Tensor:
    """Return the mean residual of replicas resumed with ``config``, to be added to their steps."""
    each = [part(outer, "residual") for outer in outer_of(saved, config, stage)]
    return torch.stack([debt for debt in each if len(debt)]).sum(0) / len(each)


def stated(config: RunConfig, settings: ExchangeConfig, stage: int) -> int:
    """Return the bytes that the exchange states a replica sends of this stage in a step."""
    built = build_stage(config.model, config.pipeline.stages, stage, 0, "meta")
    shapes = {name: parameter.shape for name, parameter in built.named_parameters()}
    return int(make_exchange(settings).cost(shapes, settings.replicas).total)


def expected(record: RunRecord) -> Counter[int]:
    """Return node → bytes it should send the others of its stage, over the steps it got ready. Full gradients are sent
    where estimates begin: with another number of replicas, and after a node was rebuilt from another."""
    settings, begin = ExchangeConfig(), set[int]()
    sent, place = Counter[int](), dict[str, int]()
    for _, fact in record.history:
        match fact:
            case e.RunStarted():
                begin |= set(range(STAGES)) if fact.exchange.replicas != settings.replicas else set()
                settings = fact.exchange
            case d.Form():
                place |= {member.worker: member.node for member in fact.members}
                begin |= {m.node % STAGES for m in fact.members if isinstance(m.source, d.Rebuild)}
            case e.StageReady(mode="train", stage=stage):
                plain = settings.model_copy(update={"compress": ""}) if stage in begin else settings
                sent[place[fact.worker]] += stated(record.config, plain, stage)
            case d.Commit():
                begin = set()
    return sent


def sent(record: RunRecord) -> Counter[int]:
    """Return node → bytes it sent the others of its stage, in steps that it got ready."""
    found = Counter[int]()
    for _, work in record.worked:
        if not work.dropped:
            found[work.node] += sum(size for peer, size in work.sent_bytes.items() if (peer - work.node) % STAGES == 0)
    return found


def assert_sound(record: RunRecord, within: float = 1e-6) -> None:
    """Check estimates after each saved step, up to ``within`` of their norm (fp32 rounding), and bytes as stated."""
    for saved in CheckpointStore(record.folder / "checkpoints").list():
        for stage in range(STAGES):
            apart = apart_from_mean(saved, record.config, stage)
            assert apart is None or apart < within, (saved.folder.name, stage)
    assert sent(record) == expected(record)


def same(one: StageState, other: StageState) -> bool:
    """Compare weights, moments and outer state, to the last bit."""
    pairs = [(one.weights, other.weights), (one.outer, other.outer)]
    pairs += [({n: pair[key] for n, pair in s.moments.items()} for s in (one, other)) for key in KEYS]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def assert_inline(record: RunRecord) -> None:
    """Compare losses and the last checkpoint with one process that loses and rebuilds what the fleet did."""
    trained, _, engine = inline_too(record)
    assert losses(record) == trained, "to the last bit"
    saved = newest(record.folder)
    assert saved.step == engine.step
    for node, stage in engine.stage.items():
        written = load_stage(saved.folder, record.config, stage, node // STAGES)
        assert same(written, engine.replicas.state(node)), node


def injected(record: RunRecord) -> list[int]:
    """Return the numbers of the trace's faults that were injected."""
    return sorted(fault.number for fault in facts(record, e.FaultInjected))


QUICK = [kill(1, 1, "settle"), kill(2, 2, "backward", 0.99), kill(3, 5, "commit"), kill(4, 4, "save")]
PLACES = [(kind, quarter / 4) for kind in ("forward", "backward") for quarter in range(4)]
EVERY = [
    *(kill(1 + turn, turn % 6, kind, offset) for turn, (kind, offset) in enumerate(PLACES)),
    *(kill(9 + turn, (5 * turn + 1) % 6, "settle") for turn in range(3)),
    *(kill(12 + turn, (5 * turn + 2) % 6, "commit") for turn in range(3)),
    *(kill(15 + turn, (5 * turn + 3) % 6, "save") for turn in range(2)),
    *(kill(17, node, "backward", 0.5) for node in (2, 3)),  # a whole replica at once
    *(kill(18, 4, "settle"), kill(18, 0, "transfer")),  # who copies its stage for the other
    *(kill(19, 3, "forward"), kill(19, 1, "link")),
]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("faults", [QUICK, EVERY], ids=["quick", "every moment"])
def test_a_worker_may_die_at_any_moment(tmp_path: Path, faults: list[Fault]) -> None:
    """The last checkpoint equals, to the last bit, that of one process that loses and copies the same nodes."""
    record = train(lively(tmp_path, 3, faults[-1].step + 3), faults)
    assert ending(record).outcome == "finished"
    assert injected(record) == list(range(len(faults)))
    assert_inline(record)
    assert_sound(record)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [ECONTROL, "econtrol:rand5%"])
def test_four_replicas_resume_as_three_and_three_as_four(tmp_path: Path, spec: str) -> None:
    """One replica first loses all its workers at once. One process resumes the same checkpoints with equal results."""
    config = lively(tmp_path, 4, 3, spec)
    folder, twin = folder_of(config), tmp_path / "twin"
    record = train(config, [kill(1, node, "backward", 0.5) for node in (0, 1)])
    assert injected(record) == [0, 1]
    assert_inline(record)
    assert_sound(record)
    for steps, replicas in ((5, 3), (7, 4), (8, 4)):
        saved, was = newest(folder), config
        config = config.model_copy(update={"exchange": config.exchange.model_copy(update={"replicas": replicas})})
        for stage in range(STAGES):
            before, after = residual(saved, was, stage), residual(saved, config, stage)
            assert before.any() and float((after - before).norm() / before.norm()) < 1e-6
        shutil.rmtree(twin, ignore_errors=True)
        shutil.copytree(folder, twin)
        flags = {"train.steps": str(steps), "exchange.replicas": str(replicas)}
        resume(twin, **flags, engine="inline")
        record = resume(folder, **flags)
        assert losses(record) == losses(read_run(twin)), "to the last bit"
        assert_sound(record)
        for stage in range(STAGES):
            for replica in range(replicas):
                one, two = (load_stage(newest(at).folder, config, stage, replica) for at in (folder, twin))
                assert same(one, two), (steps, stage, replica)


@pytest.mark.slow
def test_estimates_without_residuals_are_saved_and_a_missing_one_restarts_all(tmp_path: Path) -> None:
    config = lively(tmp_path, 2, 2, "ef21:rand5%")
    folder = folder_of(config)
    train(config)
    record = resume(folder, train__steps="4")
    assert losses(record) == inline_losses(record.config)
    assert_sound(record)
    saved = newest(folder)
    manifest = json.loads((saved.folder / MANIFEST).read_text())
    del manifest["sha256"]
    manifest["digests"] = {file: digest for file, digest in manifest["digests"].items() if "-at-" not in file}
    (saved.folder / MANIFEST).write_text(json.dumps(manifest))
    for stage in range(STAGES):
        assert apart_from_mean(newest(folder), config, stage) is None


@pytest.mark.slow
def test_replicas_continue_without_one_that_is_not_replaced(tmp_path: Path) -> None:
    """The last checkpoint lacks the estimate and residual of the dead replica; no other residual is lost."""
    config = lively(tmp_path, 4, 6, fleet={"spares": 0, "missed_heartbeats": 40, "replace": False})
    folder = folder_of(config)
    record = train(config, [kill(2, 1, "settle")])
    assert ending(record).outcome == "cannot" and len(losses(record)) == 2
    was = newest(folder)
    now = config.model_copy(update={"exchange": config.exchange.model_copy(update={"replicas": 3})})
    assert was.whole and apart_from_mean(was, now, 1) is None
    debts = [part(read_stage(was.folder, 1, was.step, index=place).outer, "residual") for place in (0, 2, 3)]
    assert float((residual(was, now, 1) - sum(debts) / 3).norm() / sum(debts).norm()) < 1e-6
    record = resume(folder, exchange__replicas="3")
    assert sorted(losses(record)) == list(range(6))
    assert_sound(record)


@pytest.mark.slow
def test_a_machine_takes_over_a_lost_replica_and_hands_it_back(tmp_path: Path) -> None:
    """Its two workers are spares until a replica loses both; when it leaves, two start at home and take over."""
    rare = {"checkpoint": {"every": 4, "keep": 1000}, "fleet": {"spares": 0, "missed_heartbeats": 40}, "network": PACE}
    with live(lively(tmp_path, 4, FOREVER, **rare)) as run:
        run.wait_until(lambda record: len(losses(record)) > 3)
        with joined_machine(run.folder, workers=2) as machine:
            record = run.wait_until(lambda record: {"w8", "w9"} <= pids(record).keys())
            for node in (2, 3):
                os.kill(pids(record)[holders(record)[node]], signal.SIGKILL)
            run.wait_until(lambda r: {holders(r)[2], holders(r)[3]} == {"w8", "w9"} and since(r) > 2)
            machine.send_signal(signal.SIGTERM)
            assert machine.wait(30) == 0
            run.wait_until(lambda record: not {"w8", "w9"} & {*holders(record).values()} and since(record) > 5)
        record = stopped(run)
    handing = [form.handover_from for form in facts(record, d.Form) if form.outcome == "handed over"]
    assert {worker for handed in handing for worker in handed.values()} == {"w8", "w9"}
    assert_inline(record)
    assert_sound(record, within=3e-6)
