"""``planaria advise`` on a short and on a long run."""

from __future__ import annotations

import re

import pytest

from command_line import refused
from planaria import cli


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
    assert "as good  " in out
    doubted = r"^don't know +checkfree_plus: raced with 0.34 million parameters, .+; at the same cost [\d.]+ seconds$"
    assert re.search(doubted, out, re.MULTILINE)


@pytest.mark.slow
def test_advice_on_a_longer_run_is_in_minutes_or_hours(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(
        r"^advice +.+: \d\d\.\d\d minutes ", advice(capsys, "demo", "--train.steps", "20000"), re.MULTILINE
    )
    large = ["--train.device", "cpu", "--train.precision", "fp32"]
    assert re.search(r"^advice +.+: \d{3}\.\d hours ", advice(capsys, "llama_500m", *large), re.MULTILINE)


def test_missing_network_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "advise", "gossip")
    assert "network.store_bandwidth" in line and "set each in [network]" in line
