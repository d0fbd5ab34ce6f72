"""Classes from outside the package on a live fleet: workers import them too, and a SIGKILL is survived."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from planaria import load
from planaria import train as run_of
from planaria.common.errors import UserError
from planaria.config.schema import FleetConfig, RunConfig
from planaria.control.facts import decisions as d
from planaria.faults.trace import Fault
from planaria.runtime.custom_classes import custom_classes
from planaria.runtime.preparation.config_checks import check
from support.live.harness import apart, ending, facts, in_one_process, inline, losses, outcomes, rebuilt, tiny, train

EXAMPLES = Path(__file__).parents[2] / "examples"
KILLS = [Fault(step=5, stage=2), Fault(step=9, stage=3)]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, allow_code: None, tmp_path: Path) -> None:
    """Modules of the examples and of the test's own folder can be imported."""
    for folder in (EXAMPLES, tmp_path):
        monkeypatch.syspath_prepend(str(folder))


def test_a_custom_strategy_rebuilds_stages_on_the_fleet_as_inline(tmp_path: Path) -> None:
    strategy = "own_strategy:Noisy"
    recovery: dict[str, Any] = {"strategy": strategy, "options": {"noise": 0.05, "moments": "mean"}}
    record = train(tiny(tmp_path, recovery=recovery), KILLS)
    assert outcomes(record) == ["started", "recovered", "recovered"] and ending(record).outcome == "finished"
    assert losses(record) == inline(record)[0]
    assert {m.source.by for m in rebuilt(record)} == {strategy}
    plain = losses(train(tiny(tmp_path / "plain", recovery={"options": {"moments": "mean"}}), KILLS))
    assert plain[0] == losses(record)[0] and plain[15] != losses(record)[15], "the noise is there"


@pytest.mark.slow
def test_a_custom_family_trains_and_recovers(tmp_path: Path) -> None:
    model: dict[str, Any] = {"family": "own_family:Recurrent", "options": {"width": 24}}
    config = tiny(tmp_path, steps=12, model=model, recovery={"options": {"lr_scale": 1.0}})
    record = train(config, KILLS)
    assert outcomes(record) == ["started", "recovered", "recovered"] and ending(record).outcome == "finished"
    assert apart(losses(record), inline(record)[0]) == 0.0
    with pytest.raises(UserError, match=r"'own_family:Recurrent' has no single model"):
        load(record.folder).complete("The ")


@pytest.mark.slow
def test_a_custom_exchange_is_the_same_on_the_fleet_and_inline(tmp_path: Path) -> None:
    kind = "own_exchange:Agreeing"

    def agreeing(folder: str, share: float) -> RunConfig:
        exchange = {"replicas": 3, "kind": kind, "options": {"share": share, "bits": 8}}
        return tiny(tmp_path / folder, stages=1, steps=8, exchange=exchange)

    config = agreeing("masked", 0.5)
    assert [found.__name__ for found in custom_classes(config)] == ["Agreeing"]
    record = train(config, [Fault(step=2, stage=3), Fault(step=5, stage=0)])
    assert outcomes(record) == ["started", "recovered", "recovered"] and ending(record).outcome == "finished"
    assert losses(record) == inline(record)[0], "to the last bit"
    plain = losses(in_one_process(agreeing("plain", 0.0)))
    assert plain[0] == losses(record)[0] and plain[7] != losses(record)[7], "the mask is there"


def test_a_custom_gossip_meets_in_pairs_and_survives_a_kill(tmp_path: Path) -> None:
    exchange = {"replicas": 2, "kind": "own_exchange:Elastic", "options": {"pull": 0.3, "every": 3, "bits": 8}}
    config = tiny(tmp_path, stages=1, steps=9, exchange=exchange)
    record = train(config, [Fault(step=4, stage=1)])
    assert ending(record).outcome == "finished" and outcomes(record)[-1] == "recovered"
    assert any(len(settle.members) == 2 for settle in facts(record, d.Settle))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("settle", "message"),
    [
        ("raise RuntimeError('no')", r"NAME:Failing failed: .*NAME\.py:5: RuntimeError: no$"),
        ("raise SystemExit(0)", r"NAME:Failing failed: .*NAME\.py:5: SystemExit: 0$"),
        ("return None", r"NAME:Failing may be the cause: .*: TypeError: cannot unpack"),
    ],
)
@pytest.mark.parametrize("engine", ["fleet", "inline"])
def test_a_failing_exchange_ends_the_run_and_is_named(tmp_path: Path, engine: str, settle: str, message: str) -> None:
    name = f"failing_{abs(hash(settle))}"
    (tmp_path / f"{name}.py").write_text(
        "from planaria.exchange.allreduce import AllReduce\n\nclass Failing(AllReduce):\n"
        f"    def settle(self, outer, fast, offers, me):\n        {settle}\n"
    )
    config = tiny(tmp_path, stages=1, steps=2, exchange={"replicas": 2, "kind": f"{name}:Failing"})
    with pytest.raises(UserError, match=message.replace("NAME", name)) as raised:
        run_of(config, engine=engine, progress=False)
    assert raised.value.folder is not None and load(raised.value.folder).losses == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return nn.Linear(config.dim, config.dim)", r"stage 0 has no method 'embed'; the ends need embed\(tokens\)"),
        ("return None", r"stage 0 is NoneType; build_stage must return a torch\.nn\.Module"),
        ("return Wide()", r"stage 0 returns \[1, 32, 64\] for one sample, not \[1, 32, 32\]"),
    ],
)
def test_an_incomplete_family_is_refused_before_a_worker_starts(tmp_path: Path, body: str, message: str) -> None:
    name = f"family_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\nfrom torch import nn\nfrom planaria.models.family import Family\n\n"
        "class Wide(nn.Module):\n    def embed(self, tokens):\n        return torch.zeros(*tokens.shape, 64)\n"
        "    def loss(self, x, targets):\n        return x.mean()\n\n"
        f"class Mine(Family):\n    def build_stage(self, config, stages, stage):\n        {body}\n"
    )
    with pytest.raises(UserError, match=message):
        check(tiny(tmp_path, model={"family": f"{name}:Mine"}))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("threads", [3, 1])
def test_each_worker_computes_with_the_threads_of_the_recipe(tmp_path: Path, threads: int) -> None:
    counts = tmp_path / "counts"
    counts.mkdir()
    model = {"family": "support.live.custom_families:Counting", "options": {"folder": str(counts)}}
    record = train(tiny(tmp_path, stages=2, steps=4, model=model, fleet={"threads": threads}))
    (counts / str(os.getpid())).unlink(missing_ok=True)
    assert [file.read_text() for file in counts.iterdir()] == [str(threads)] * 4
    assert apart(losses(record), inline(record)[0]) <= 1e-5


@pytest.mark.parametrize("threads", [0, -1, 1 << 11])
def test_invalid_numbers_of_threads_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        FleetConfig(threads=threads)
