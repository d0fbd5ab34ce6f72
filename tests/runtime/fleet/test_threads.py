"""Workers on CPUs compute with as many threads as the recipe says, and the first losses are the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import apart, inline, losses, tiny, train

from planaria.config.schema import FleetConfig


@pytest.mark.slow_after(1)
@pytest.mark.usefixtures("allow_code")
@pytest.mark.parametrize("threads", [3, 1])
def test_every_worker_computes_with_the_threads_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    counts = tmp_path / "counts"
    counts.mkdir()
    model = {"family": "counting_family:Counting", "options": {"folder": str(counts)}}
    record = train(tiny(tmp_path, stages=2, steps=4, model=model, fleet={"threads": threads}))
    (counts / str(os.getpid())).unlink(missing_ok=True)
    assert [file.read_text() for file in counts.iterdir()] == [str(threads)] * 4
    assert apart(losses(record), inline(record)[0]) <= 1e-5


@pytest.mark.parametrize("threads", [0, -1, 1 << 11])
def test_numbers_of_threads_that_make_no_sense_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        FleetConfig(threads=threads)
