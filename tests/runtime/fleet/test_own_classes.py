"""Classes from outside the package on a live fleet: workers import them too, and a SIGKILL is survived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import apart, ending, facts, inline, losses, outcomes, tiny, train

from observer import train_inline
from planaria import load
from planaria import train as run_of
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.faults.trace import Fault
from planaria.runtime.engine.check import check
from planaria.runtime.engine.own_classes import own_classes

EXAMPLES = Path(__file__).parents[3] / "examples"
KILLS = [Fault(step=5, stage=2), Fault(step=9, stage=3)]


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch, allow_code: None) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_a_strategy_of_ones_own_rebuilds_stages_on_the_fleet_as_it_does_inline(tmp_path: Path) -> None:
    strategy = "own_strategy:Noisy"
    recovery: dict[str, Any] = {"strategy": strategy, "options": {"noise": 0.05, "moments": "mean"}}
    record = train(tiny(tmp_path, recovery=recovery), KILLS)
    assert outcomes(record) == ["started", "recovered", "recovered"] and ending(record).outcome == "finished"
    assert losses(record) == inline(record)[0]
    sources = [m.source for form in facts(record, d.Form) for m in form.members if isinstance(m.source, d.Rebuild)]
    assert {source.by for source in sources} == {strategy}
    plain = losses(train(tiny(tmp_path / "plain", recovery={"options": {"moments": "mean"}}), KILLS))
    assert plain[0] == losses(record)[0] and plain[15] != losses(record)[15], "the noise is there"


@pytest.mark.slow
def test_a_family_of_ones_own_trains_and_recovers(tmp_path: Path) -> None:
    model: dict[str, Any] = {"family": "own_family:Recurrent", "options": {"width": 24}}
    config = tiny(tmp_path, steps=12, model=model, recovery={"options": {"lr_scale": 1.0}})
    record = train(config, KILLS)
    assert outcomes(record) == ["started", "recovered", "recovered"] and ending(record).outcome == "finished"
    assert apart(losses(record), inline(record)[0]) == 0.0
    with pytest.raises(UserError, match=r"'own_family:Recurrent' cannot be made one model"):
        load(record.folder).complete("The ")


@pytest.mark.slow
def test_an_exchange_of_ones_own_agrees_on_the_fleet_as_it_does_inline(tmp_path: Path) -> None:
    kind = "own_exchange:Agreeing"

    def agreeing(folder: str, share: float) -> RunConfig:
        exchange = {"replicas": 3, "kind": kind, "options": {"share": share, "bits": 8}}
        return tiny(tmp_path / folder, stages=1, steps=8, exchange=exchange)

    config = agreeing("masked", 0.5)
    assert [found.__name__ for found in own_classes(config)] == ["Agreeing"]
    record = train(config, [Fault(step=2, stage=3), Fault(step=5, stage=0)])
    assert outcomes(record) == ["started", "recovered", "recovered"] and ending(record).outcome == "finished"
    assert losses(record) == inline(record)[0], "to the last bit"
    plain = losses(train(agreeing("plain", 0.0), engine=train_inline))
    assert plain[0] == losses(record)[0] and plain[7] != losses(record)[7], "the mask is there"


def test_gossip_of_ones_own_meets_in_pairs_and_survives_a_kill(tmp_path: Path) -> None:
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
def test_an_exchange_that_fails_ends_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, settle: str, message: str
) -> None:
    name = f"failing_{abs(hash(settle))}"
    (tmp_path / f"{name}.py").write_text(
        "from planaria.exchange.allreduce import AllReduce\n\nclass Failing(AllReduce):\n"
        f"    def settle(self, outer, fast, offers, me):\n        {settle}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny(tmp_path, stages=1, steps=2, exchange={"replicas": 2, "kind": f"{name}:Failing"})
    with pytest.raises(UserError, match=message.replace("NAME", name)) as raised:
        run_of(config, engine=engine, progress=False)
    assert raised.value.folder is not None and load(raised.value.folder).losses == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return nn.Linear(config.dim, config.dim)", r"stage 0 has no method 'embed'; the ends need embed\(tokens\)"),
        ("return None", r"stage 0 is NoneType; build_stage must return a torch\.nn\.Module"),
        ("return Wide()", r"stage 0 gives \[1, 32, 64\] for one sample, not \[1, 32, 32\]"),
    ],
)
def test_a_family_without_the_door_is_refused_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    name = f"family_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\nfrom torch import nn\nfrom planaria.models.family import Family\n\n"
        "class Wide(nn.Module):\n    def embed(self, tokens):\n        return torch.zeros(*tokens.shape, 64)\n"
        "    def loss(self, x, targets):\n        return x.mean()\n\n"
        f"class Mine(Family):\n    def build_stage(self, config, stages, stage):\n        {body}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=message):
        check(tiny(tmp_path, model={"family": f"{name}:Mine"}))
