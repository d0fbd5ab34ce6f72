"""Advice on compression: shipped measurements match the races, seconds are the clock's, break-evens are exact."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks.compression import experience_of
from benchmarks.harness import saved

from planaria import cli
from planaria.config import shipped
from planaria.config.recipe import load
from planaria.config.schema import RunConfig
from planaria.lab.commands.advise_compress import MIN_SPEEDUP, CompressionArm, advise, shipped_experience, weigh_scheme
from planaria.lab.compare.clock import arm_clock
from planaria.lab.compare.experience import Range


def recipe(bandwidth: float = 12.5e6, **exchange: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"vocab": 512, "dim": 64, "layers": 2, "heads": 4, "hidden": 176, "context": 64},
            "pipeline": {"stages": 2, "microbatches": 2, "microbatch_size": 4},
            "exchange": {"replicas": 4, **exchange},
            "network": {"latency_s": 0.04, "bandwidth": bandwidth, "forward_s": [0.05], "backward_s": [0.1]},
        }
    )


def arm(name: str, steps: float | None, **changes: str) -> CompressionArm:
    alike = None if steps is None else Range(mean=steps, low=steps, high=steps)
    settings = {f"exchange.{key}": value for key, value in changes.items()}
    loss = Range(mean=1.0, low=1.0, high=1.0)
    return CompressionArm(name=name, changes=settings, loss=loss, steps=alike, missed=3 * (not alike))


DENSE = arm("dense", 1.0)


def test_the_shipped_experience_is_that_of_the_saved_race_and_benchmark() -> None:
    assert experience_of(json.dumps(saved("compression_race"))) == shipped_experience()
    known = {each.name: each for each in shipped_experience().arms}
    assert known["dense"].loss.mean == 1.0 and known["top1-ef21"].loss.low > 1.4 and known["top1-ef21"].missed == 3
    assert known["noloco-7"].missed == 2 and known["noloco-7"].steps is None, "no mean over some seeds only"


def test_seconds_are_the_clock_s_and_coding_counts_only_where_measured() -> None:
    known = shipped_experience()
    by_name = {each.name: weigh_scheme(recipe(), each, known.coding) for each in known.arms}
    eight = arm_clock(recipe(compress="ef14:8bits")).step_s
    assert (by_name["8-bits"].step_s, by_name["8-bits"].coding_s) == (eight, None)
    sparse, plain = by_name["top5-ef14"], arm_clock(recipe(compress="ef14:top5%")).step_s
    assert sparse.coding_s is not None and sparse.step_s == pytest.approx(plain + sparse.coding_s)
    assert by_name["top5-econtrol"].eta == pytest.approx(0.025, rel=0.01) and by_name["top5-ef21"].eta is None
    assert by_name["top5-ef14"].step_bytes < by_name["dense"].step_bytes / 19
    own = weigh_scheme(recipe(compress="sign"), DENSE, known.coding)
    assert own.step_s == by_name["dense"].step_s, "the recipe's own compression is ignored"


def test_compression_pays_off_below_the_break_even_only() -> None:
    known = shipped_experience()
    found = advise(recipe(), known)
    assert found.best is not None and found.best.arm.name == "8-bits" and found.break_even is not None
    for factor, pays in ((0.99, True), (1.01, False)):
        there = advise(recipe(factor * found.break_even), known)
        assert (there.best is not None) == pays
        assert there.break_even == pytest.approx(found.break_even, rel=1e-3), "from either side"


def test_a_scheme_that_missed_the_loss_is_never_advised() -> None:
    quick = arm("less", None, compress="top1%")
    known = shipped_experience().model_copy(update={"arms": [DENSE, quick]})
    found = advise(recipe(1e4), known)
    assert found.best is None and found.break_even is None and found.schemes[0].arm is quick
    slower = known.model_copy(update={"arms": [DENSE, arm("slow", 50.0, compress="8bits")]})
    assert advise(recipe(), slower).best is None, "fewer bytes, and many more steps"
    nearly = advise(recipe(1e9), shipped_experience())
    assert nearly.best is None and nearly.dense.step_s < MIN_SPEEDUP * min(
        scheme.step_s for scheme in nearly.schemes if scheme.arm.steps
    )


def test_the_numbers_in_the_documentation_are_reproduced() -> None:
    """docs/replicas.md, of four replicas of the recipe demo."""
    demo = load(shipped.find("demo"), {"exchange.replicas": "4"}, "train")
    fast = advise(demo, shipped_experience())
    assert fast.best is None and fast.break_even == pytest.approx(1.5e9, rel=0.03)
    network = demo.network.model_copy(update={"bandwidth": 12.5e6})
    slow = advise(demo.model_copy(update={"network": network}), shipped_experience())
    assert slow.best is not None and slow.best.label == "ef14:4bits" and slow.best.arm.steps is not None
    assert slow.best.step_s / slow.dense.step_s == pytest.approx(0.675, abs=5e-4)
    assert slow.best.arm.steps.mean == pytest.approx(1.010, abs=5e-4)


FOUR = """
[exchange]
replicas = 4
[network]
latency_s = 0.04
bandwidth = 12.5e6
forward_s = [0.05]
backward_s = [0.1]
"""


def test_the_command_prints_advice_price_and_break_even(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "four.toml").write_text(FOUR)

    def printed(*flags: str) -> str:
        assert cli.run(["advise", str(tmp_path / "four.toml"), "--compress", *flags]) == 0
        return capsys.readouterr().out

    out = printed()
    for word in ("ef14:8bits", "econtrol:top5%", "noloco, every 33", "diloco, every 20", "missed by 3 of 3"):
        assert word in out
    assert re.search(r"^advice +ef14:(.bits): .* of dense \(--exchange\.compress ef14:\1\)$", out, re.MULTILINE)
    below = r"^break-even +compression pays if network\.bandwidth is below [\d.e+]+ \(now 1\.25e\+07\)"
    assert re.search(below, out, re.MULTILINE)
    assert "econtrol takes delta / 2: 0.005" in out and "with optim.kind = 'adamw' nothing is proved" in out
    assert "4 replicas of 2 layers of width 64" in out and "seeds 1, 2, 3" in out and "[1.105 … 1.125]" in out
    out = printed("--network.bandwidth", "1e12", "--network.latency_s", "0")
    assert re.search(r"^advice +none: ", out, re.MULTILINE)
    assert not re.search(r"^(its cost|faster) ", out, re.MULTILINE)
    assert "compression does not pay there either" in out


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--exchange.replicas", "1"], ["exchange.replicas = 1", "exchange.replicas >= 2"]),
        (["--exchange.kind", "diloco"], ["exchange.kind = 'diloco'", "set exchange.kind = 'allreduce'"]),
        (["--network.bandwidth", "none"], ["advice needs network.bandwidth", "set each in [network]"]),
        (["--exchange.robust", "median"], ["exchange.robust = 'median'", "remove it"]),
        (["--delays", "runs/x"], ["--compress and --delays", "pass one of them"]),
    ],
)
def test_unsupported_recipes_are_rejected_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], names: list[str]
) -> None:
    (tmp_path / "four.toml").write_text(FOUR)
    with pytest.raises(SystemExit) as ended:
        cli.main(["advise", str(tmp_path / "four.toml"), "--compress", *flags])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.count("\n") == 1
    assert all(name in err for name in names), err
