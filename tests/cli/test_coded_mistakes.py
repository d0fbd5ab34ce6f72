"""Invalid gradient codes are refused before any worker is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command_mistakes import mistake, train

GC = 'coded = "gc"'
MSGC = 'coded = { scheme = "msgc", burst = 1, window = 2, stragglers = 1, jobs = 2 }'


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("coded = 3", ["exchange.coded"]),
        ('coded = { scheme = "gc", slow = nan }', ["exchange.coded.slow = nan", "above 1"]),
        ('coded = { scheme = "msgc", burst = 2, window = 2 }', ["burst = 2 is not below window = 2", "window = 3"]),
        ('coded = { scheme = "srsgc", burst = 2, window = 4 }', ["does not divide window − 1 = 3", "use window = 5"]),
        ('coded = { scheme = "msgc", stragglers = "auto" }', ["'auto' needs measured delays", "planaria advise"]),
        (f"{MSGC}\n[pipeline]\nmicrobatches = 5", ["pipeline.microbatches", "multiple of 6", "not 5; use 6"]),
        (f'{GC}\nkind = "diloco"', ["exchange.coded", "gradients in every step", "set exchange.kind = 'allreduce'"]),
        (f'{GC}\nkind = "local"', ["exchange.coded", "gradients in every step", "set exchange.kind = 'allreduce'"]),
        (f'{GC}\ncompress = "econtrol:top1%"', ["exchange.coded", "exchange.compress", "messages are sums"]),
        (f"{GC}\noptions.bits = 8", ["exchange.coded", "options.bits", "messages are sums"]),
        (f'{GC}\nrobust = "median"', ["exchange.coded", "exchange.robust", "messages are sums"]),
        (f"{GC}\n[routing]\nmixed = true", ["exchange.coded", "does not support routing.mixed; remove it"]),
        (f'{GC}\n[recovery]\nmeanwhile = "skip"', ["exchange.coded", "recovery.meanwhile = 'wait'"]),
        (f"{GC}\nreplicas = 2", ["exchange.replicas = 3 or more", "not 2"]),
    ],
)
def test_an_invalid_gradient_code_is_refused(
    home: Path,
    capfd: pytest.CaptureFixture[str],
    text: str,
    names: list[str],
) -> None:
    """tests/exchange/test_coded.py checks every message about a scheme itself."""
    section = text if "replicas" in text else f"replicas = 4\n{text}"
    plain = (home / "good.toml").read_text()
    if "[pipeline]" in text:  # a table may appear only once
        section, _, pipeline = section.partition("\n[pipeline]\n")
        plain = plain.replace("microbatches = 2", pipeline)
    (home / "bad.toml").write_text(f"{plain}[exchange]\n{section}\n")
    mistake(capfd, home, train(home, "--engine", "fleet", recipe="bad.toml"), *names)
