"""Replicas that send 1 % of every step's gradient, through deaths at any moment, resumptions, a machine that comes and
goes: what they send, what they learn, and that their estimates stay what they must be."""

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
from harness import assert_no_orphans, checked, ending, facts, folder_of, inline_too, live, losses, tiny, train
from test_gradient_exchange import inline_losses
from test_join import FOREVER, PACE, guest, joined, since, stopped
from torch import Tensor

from planaria.cli.commands import train as command
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.logs import RunRecord, read_run
from planaria.exchange.kinds import exchange
from planaria.faults.trace import Fault
from planaria.models.families import build_stage
from planaria.models.optimizers.adamw import KEYS
from planaria.models.state import StageState
from planaria.runtime.checkpoint.loading import stage_for
from planaria.runtime.checkpoint.stage_file import read_stage
from planaria.runtime.checkpoint.store import MANIFEST, CheckpointStore, Saved

SAID = "econtrol:top1%"
STAGES = 2
"""of each replica: the ends and a block stage"""


def lively(folder: Path, replicas: int, steps: int, said: str = SAID, **sections: dict[str, Any]) -> RunConfig:
    """Every step is saved, and all that is saved is kept."""
    fields: dict[str, dict[str, Any]] = {
        "exchange": {"replicas": replicas, "compress": said},
        "checkpoint": {"every": 1, "keep": 1000},
        "fleet": {"spares": 2, "missed": 40},
    }
    return tiny(folder, stages=STAGES - 1, steps=steps, **{**fields, **sections})


def kill(step: int, node: int, moment: str = "any", offset: float = 0.0) -> Fault:
    return Fault.model_validate({"step": step, "stage": node, "moment": moment, "offset": offset})


def part(outer: Mapping[str, Tensor], name: str) -> Tensor:
    """A part of an outer state as one vector; empty if there is none."""
    held = [tensor.reshape(-1) for key, tensor in sorted(outer.items()) if key.startswith(f"{name}/")]
    return torch.cat([*held, torch.empty(0)]).double()


def outer_of(saved: Saved, config: RunConfig, stage: int) -> list[Mapping[str, Tensor]]:
    """The outer state of each replica of a stage, in a run that goes on as ``config`` says."""
    return [stage_for(saved.folder, config, stage, replica).outer for replica in range(config.exchange.replicas)]


def apart_from_mean(saved: Saved, config: RunConfig, stage: int) -> float | None:
    """‖h̄ − mean hᵢ‖ / ‖h̄‖ as all replicas have saved them; None where all are to begin their estimates anew."""
    assert saved.manifest.exchange is not None
    held = outer_of(saved, config.model_copy(update={"exchange": saved.manifest.exchange}), stage)
    first, *others = [part(outer, "mean_estimate") for outer in held]
    assert len(first) and all(torch.equal(first, other) for other in others), "the same at all, to the last bit"
    own = [part(outer, "estimate") for outer in held]
    if not any(len(estimate) for estimate in own):
        return None
    return float((first - torch.stack(own).mean(0)).norm() / first.norm())


def owed(saved: Saved, config: RunConfig, stage: int) -> Tensor:
    """The mean of what replicas owe that go on as ``config`` says: what is to be added to their steps yet."""
    each = [part(outer, "residual") for outer in outer_of(saved, config, stage)]
    return torch.stack([debt for debt in each if len(debt)]).sum(0) / len(each)


def stated(config: RunConfig, settings: ExchangeConfig, stage: int) -> int:
    """Bytes that the exchange says a replica sends of this stage in a step."""
    built = build_stage(config.model, config.pipeline.stages, stage, 0, "meta")
    shapes = {name: parameter.shape for name, parameter in built.named_parameters()}
    return int(exchange(settings).cost(shapes, settings.replicas).total)


def expected(record: RunRecord) -> Counter[int]:
    """Node → bytes that it was to send the others of its stage, by what happened: in each step that it got ready, in
    full where estimates begin. That is with another number of replicas, and after a node was rebuilt from another."""
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
                said = settings.model_copy(update={"compress": ""}) if stage in begin else settings
                sent[place[fact.worker]] += stated(record.config, said, stage)
            case d.Commit():
                begin = set()
    return sent


def sent(record: RunRecord) -> Counter[int]:
    """Node → bytes that it has sent the others of its stage, in steps that it got ready."""
    found = Counter[int]()
    for _, work in record.worked:
        if not work.dropped:
            found[work.node] += sum(size for peer, size in work.sent_bytes.items() if (peer - work.node) % STAGES == 0)
    return found


def assert_sound(record: RunRecord, within: float = 1e-6) -> None:
    """After every step that was saved, estimates are what they must be; bytes are as stated.

    ``within``: of the norm, which the rounding of long runs in fp32 exceeds.
    """
    for saved in CheckpointStore(record.folder / "checkpoints").list():
        for stage in range(STAGES):
            apart = apart_from_mean(saved, record.config, stage)
            assert apart is None or apart < within, (saved.folder.name, stage)
    assert sent(record) == expected(record)


def same(one: StageState, other: StageState) -> bool:
    """To the last bit: weights, moments, and outer state."""
    pairs = [(one.weights, other.weights), (one.outer, other.outer)]
    pairs += [({n: pair[key] for n, pair in s.moments.items()} for s in (one, other)) for key in KEYS]  # type: ignore[misc]
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def assert_inline(record: RunRecord) -> None:
    """Losses, and all that was saved last, are those of one process that loses and rebuilds what the fleet did."""
    trained, _, engine = inline_too(record)
    assert losses(record) == trained, "to the last bit"
    saved = CheckpointStore(record.folder / "checkpoints").newest()
    assert saved is not None and saved.step == engine.step and engine.replicas is not None
    for node, stage in engine.stage.items():
        written = stage_for(saved.folder, record.config, stage, node // STAGES)
        assert same(written, engine.replicas.state(node)), node


def struck(record: RunRecord) -> list[int]:
    """The faults of the trace that have struck, by number."""
    return sorted(fault.number for fault in facts(record, e.FaultInjected))


QUICK = [kill(1, 1, "settle"), kill(2, 2, "backward", 0.99), kill(3, 5, "commit"), kill(4, 4, "save")]
PLACES = [(kind, quarter / 4) for kind in ("forward", "backward") for quarter in range(4)]
EVERY = [
    *(kill(1 + turn, turn % 6, kind, offset) for turn, (kind, offset) in enumerate(PLACES)),
    *(kill(9 + turn, (5 * turn + 1) % 6, "settle") for turn in range(3)),
    *(kill(12 + turn, (5 * turn + 2) % 6, "commit") for turn in range(3)),
    *(kill(15 + turn, (5 * turn + 3) % 6, "save") for turn in range(2)),
    *(kill(17, node, "backward", 0.5) for node in (2, 3)),  # together: all of a replica
    *(kill(18, 4, "settle"), kill(18, 0, "transfer")),  # who copies its stage for the other
    *(kill(19, 3, "forward"), kill(19, 1, "link")),
]


@pytest.mark.parametrize("faults", [QUICK, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["quick", "every moment"])
def test_a_worker_may_die_at_any_moment(tmp_path: Path, faults: list[Fault]) -> None:
    """What is saved at the end is what one process has that loses and copies the same nodes, to the last bit."""
    record = train(lively(tmp_path, 3, faults[-1].step + 3), faults)
    assert ending(record).outcome == "finished"
    assert struck(record) == list(range(len(faults)))
    assert_inline(record)
    assert_sound(record)


def newest(folder: Path) -> Saved:
    saved = CheckpointStore(folder / "checkpoints").newest()
    assert saved is not None
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("said", [SAID, pytest.param("econtrol:rand5%", marks=pytest.mark.slow)])
def test_four_replicas_go_on_as_three_and_three_as_four(tmp_path: Path, said: str) -> None:
    """The first lost all its workers at once before. One process goes on from the same checkpoints alike."""
    config = lively(tmp_path, 4, 3, said)
    folder, twin = folder_of(config), tmp_path / "twin"
    record = train(config, [kill(1, node, "backward", 0.5) for node in (0, 1)])
    assert struck(record) == [0, 1]
    assert_inline(record)
    assert_sound(record)
    for steps, replicas in ((5, 3), (7, 4), (8, 4)):
        saved, was = newest(folder), config
        config = config.model_copy(update={"exchange": config.exchange.model_copy(update={"replicas": replicas})})
        for stage in range(STAGES):
            before, after = owed(saved, was, stage), owed(saved, config, stage)
            assert before.any() and float((after - before).norm() / before.norm()) < 1e-6
        shutil.rmtree(twin, ignore_errors=True)
        shutil.copytree(folder, twin)
        flags = {"train.steps": str(steps), "exchange.replicas": str(replicas)}
        for at, engine in ((folder, "fleet"), (twin, "inline")):
            assert command.resume(at, flags | {"engine": engine}, quiet=True) == 0
        assert_no_orphans(folder)
        record = checked(folder)
        assert losses(record) == losses(read_run(twin)), "to the last bit"
        assert_sound(record)
        for stage in range(STAGES):
            for replica in range(replicas):
                one, two = (stage_for(newest(at).folder, config, stage, replica) for at in (folder, twin))
                assert same(one, two), (steps, stage, replica)


@pytest.mark.slow
def test_estimates_without_debts_are_saved_too_and_where_one_is_missing_all_begin_anew(tmp_path: Path) -> None:
    config = lively(tmp_path, 2, 2, "ef21:rand5%")
    folder = folder_of(config)
    train(config)
    assert command.resume(folder, {"train.steps": "4"}, quiet=True) == 0
    assert_no_orphans(folder)
    record = checked(folder)
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
def test_replicas_go_on_without_one_that_nobody_replaces(tmp_path: Path) -> None:
    """The run ends with a checkpoint that lacks the estimate and the debt of the dead one; no other debt is lost."""
    config = lively(tmp_path, 4, 6, fleet={"spares": 0, "missed": 40, "replace": False})
    folder = folder_of(config)
    record = train(config, [kill(2, 1, "settle")])
    assert ending(record).outcome == "cannot" and len(losses(record)) == 2
    was, now = (
        newest(folder),
        config.model_copy(update={"exchange": config.exchange.model_copy(update={"replicas": 3})}),
    )
    assert was.whole and apart_from_mean(was, now, 1) is None
    debts = [part(read_stage(was.folder, 1, was.step, place=place).outer, "residual") for place in (0, 2, 3)]
    assert float((owed(was, now, 1) - sum(debts) / 3).norm() / sum(debts).norm()) < 1e-6  # type: ignore[union-attr]
    assert command.resume(folder, {"exchange.replicas": "3"}, quiet=True) == 0
    assert_no_orphans(folder)
    record = checked(folder)
    assert sorted(losses(record)) == list(range(6))
    assert_sound(record)


def holders(record: RunRecord) -> dict[int, str]:
    """Who stands where since the last formation."""
    return dict(facts(record, d.Form)[-1].holders)


@pytest.mark.slow
def test_a_machine_takes_the_place_of_a_lost_replica_and_hands_it_back(tmp_path: Path) -> None:
    """Its two workers are spares until a replica loses both; when it leaves, two are started at home, and estimates go
    on as if nothing had been."""
    rare = {"checkpoint": {"every": 4, "keep": 1000}, "fleet": {"spares": 0, "missed": 40}, "network": PACE}
    with live(lively(tmp_path, 4, FOREVER, **rare)) as run:
        run.wait_until(lambda record: len(losses(record)) > 3)
        with guest(run.folder, workers=2) as machine:
            record = run.wait_until(lambda record: {"w8", "w9"} <= joined(record).keys())
            for node in (2, 3):
                os.kill(joined(record)[holders(record)[node]], signal.SIGKILL)
            run.wait_until(lambda r: {holders(r)[2], holders(r)[3]} == {"w8", "w9"} and since(r) > 2)
            machine.send_signal(signal.SIGTERM)
            assert machine.wait(30) == 0
            run.wait_until(lambda record: not {"w8", "w9"} & {*holders(record).values()} and since(record) > 5)
        record = stopped(run)
    handing = [form.handing for form in facts(record, d.Form) if form.outcome == "handed over"]
    assert {worker for handed in handing for worker in handed.values()} == {"w8", "w9"}
    assert_inline(record)
    assert_sound(record, within=3e-6)
