"""``planaria advise --wire``: codecs on slow and fast links, and one machine alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from planaria import cli
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.lab.compare.wire_advice import WIRES, weigh_wires

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


def test_one_machine_is_advised_if_no_codec_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert "advice        one machine, if it has the memory" in advised(capsys, bandwidth="1e4")


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


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "bare.toml").write_text("[pipeline]\nstages = 2\n")
    with pytest.raises(UserError, match=r"advice needs network\.forward_s, network\.backward_s, network\.bandwidth;"):
        cli.run(["advise", str(tmp_path / "bare.toml"), "--wire"])
    with pytest.raises(UserError, match="--compress and --wire: are separate questions"):
        cli.run(["advise", "demo", "--wire", "--compress"])
