"""``planaria advise``: strategies on short and long runs, and codecs between stages (``--wire``)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planaria import cli
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.lab.commands.advise_wire import WIRES, weigh_wires
from support.command_line import refused


def advice(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(["advise", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_advice_on_a_short_run_is_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    out = advice(capsys, "demo")
    head = next(line for line in out.splitlines() if "recovery.strategy" in line)
    assert "seconds" in head and "hours" not in out
    found = re.search(r"^advice +[^:]+: ([\d.]+) seconds ", out, re.MULTILINE)
    assert found is not None and 50 < float(found[1]) < 70
    assert re.search(r"  [1-9]\d\.\d\d … [1-9]\d\.\d\d  ", out), "four digits tell the strategies apart"
    assert "equivalent  " in out
    doubted = r"^unknown +checkfree_plus: raced with 0.34 million parameters, .+; at the same cost [\d.]+ seconds$"
    assert re.search(doubted, out, re.MULTILINE)


def test_missing_network_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "advise", "gossip")
    assert "network.store_bandwidth" in line and "set each in [network]" in line


PRICES = {
    "network.forward_s": "[0.01, 0.02, 0.02, 0.02, 0.02]",
    "network.backward_s": "[0.02, 0.04, 0.04, 0.04, 0.04]",
    "network.latency_s": "0.02",
}


def advised(capsys: pytest.CaptureFixture[str], *words: str, bandwidth: str = "1.25e6") -> str:
    flags = [word for name, value in PRICES.items() for word in (f"--{name}", value)]
    assert cli.run(["advise", "demo", "--wire", "--network.bandwidth", bandwidth, *flags, *words]) == 0
    return capsys.readouterr().out


def test_on_slow_links_fewer_bits_and_on_fast_ones_none_are_advised(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = advised(capsys), advised(capsys, bandwidth="1.25e9")
    assert "fastest       4/4 with microbatches of" in slow and "of one machine's step" in slow
    assert "advice        bf16: fewer bits make a step less than 1% shorter" in fast
    for wire in WIRES:
        assert f"  {wire} " in slow


def test_small_messages_prefer_larger_microbatches() -> None:
    network = {"forward_s": [0.0], "backward_s": [0.0], "bandwidth": 25e6, "latency_s": 0.05, "inbound": "shared",
               "latency_queued": True}  # fmt: skip
    pipeline = {"stages": 4, "microbatches": 32, "microbatch_size": 2}
    config = RunConfig.model_validate(
        {"network": network, "pipeline": pipeline, "model": {"context": 1024, "dim": 1024}}
    )
    found = {choice.wire: choice for choice in weigh_wires(config).choices}
    assert found["fp32"].microbatch_size <= found["6/4"].microbatch_size
    assert found["6/4"].step_s <= found["6/4"].same_size_s
    steps = [found[wire].step_s for wire in WIRES]
    assert steps == sorted(steps, reverse=True)


def test_missing_costs_are_named(tmp_path: Path) -> None:
    (tmp_path / "bare.toml").write_text("[pipeline]\nstages = 2\n")
    with pytest.raises(UserError, match=r"advice needs network\.forward_s, network\.backward_s, network\.bandwidth;"):
        cli.run(["advise", str(tmp_path / "bare.toml"), "--wire"])
    with pytest.raises(UserError, match="--compress and --wire: are separate questions"):
        cli.run(["advise", "demo", "--wire", "--compress"])
