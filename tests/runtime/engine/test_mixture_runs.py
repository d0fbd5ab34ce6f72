"""Runs on a mixture: the shares of its sources and their epochs, also when resumed in other shapes."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

import planaria
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.log.reader import read_run
from planaria.data.dataset import Dataset, Split
from planaria.report.run.sample_ledger import prove_exactly_once
from planaria.runtime.preparation import run_folders
from support.tiny_engine import config_in

CONTEXT = 8
WINDOWS = {"books": 140, "code": 40, "web": 20}
"""in shares of 70, 20 and 10 %: 400 samples read each source twice"""
Read = list[tuple[Path, int]]


def recipe(home: Path, **sections: Any) -> RunConfig:
    """A tiny run on the mixture 70/20/10, of at most two epochs of each source."""
    mixture: dict[str, Any] = {}
    for name, weight in (("books", 0.7), ("code", 0.2), ("web", 0.1)):
        words = itertools.cycle(f"{name} {i}; " for i in range(97))
        text = "".join(itertools.islice(words, 400))[: WINDOWS[name] * CONTEXT]
        (home / f"{name}.txt").write_text(text)
        mixture[name] = {"source": str(home / f"{name}.txt"), "weight": weight, "epochs": 2}
    given: dict[str, Any] = {
        "model": {"layers": 12, "dim": 16, "hidden": 24, "context": CONTEXT},
        "pipeline": {"stages": 4, "microbatches": 2, "microbatch_size": 2},
        "data": {"source": "stdlib", "mixture": mixture, "validation": 0.0},
        "optim": {"clip": 0.0},
        "train": {"steps": 40},
        "observe": {"trackers": ""},
    }
    for name, fields in sections.items():
        given[name] = {**given.get(name, {}), **fields}
    return config_in(home, **given).model_copy(update={"engine": "inline", "out": str(home / "runs")})


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """The reads of prepared folders in order, as (folder, window)."""
    found: Read = []
    really = Dataset.read

    def noted(self: Dataset, split: Split, start: int, count: int) -> npt.NDArray[Any]:
        assert count == CONTEXT + 1
        found.append((self.folder, start // CONTEXT))
        return really(self, split, start, count)

    monkeypatch.setattr(Dataset, "read", noted)
    return found


def require_fair(read: Read, epochs: int) -> None:
    """Shares within 0.5 %, and in each epoch of a source every window at most once."""
    by_folder = Counter(folder for folder, _ in read)
    shares = sorted(count / len(read) for count in by_folder.values())
    assert all(abs(share - target) < 0.005 for share, target in zip(shares, (0.1, 0.2, 0.7), strict=True)), shares
    for (folder, count), windows in zip(sorted(by_folder.items(), key=lambda c: -c[1]), WINDOWS.values(), strict=True):
        places = [place for where, place in read if where == folder]
        assert len(places) == count <= epochs * windows
        for first in range(0, count, windows):
            epoch = places[first : first + windows]
            assert len(set(epoch)) == len(epoch)


@pytest.mark.slow
def test_two_epochs_of_a_mixture_through_two_other_shapes(tmp_path: Path, read: Read) -> None:
    """160 samples at 4 stages, 96 by 2 replicas at 2 stages, 144 by 3 replicas at 1 stage."""
    output: list[str] = []
    planaria.train(recipe(tmp_path), progress=False, notify=output.append)
    assert "mixture       books: 70.0% of the samples, 0.80 epochs of its 140 samples" in output
    require_fair(read, 1)
    folder = tmp_path / "runs" / "run"
    continued(folder, "pipeline.stages 2", "exchange.replicas 2", "train.steps 52")
    require_fair(read, 2)
    output = continued(folder, "pipeline.stages 1", "exchange.replicas 3", "train.steps 64")
    assert "mixture       web: 10.0% of the samples, 2.00 epochs of its 20 samples" in output
    require_fair(read, 2)
    assert prove_exactly_once(read_run(folder)) == []
    assert len(read) == 400 and set(Counter(read).values()) == {2}, "every window in each of its epochs"
    with pytest.raises(UserError, match=r"data\.mixture\.books\.epochs = 2: .* set train\.steps to 64 or less"):
        continued(folder, "train.steps 65")
    continued(folder, "train.steps 65", *(f"data.mixture.{name}.epochs 3" for name in WINDOWS))
    with pytest.raises(UserError, match=r"--data\.mixture\.web\.weight 0\.5: cannot change when .* is resumed"):
        continued(folder, "train.steps 66", "data.mixture.web.weight 0.5")


@pytest.mark.slow
def test_a_mixture_is_the_same_through_any_cut(tmp_path: Path) -> None:
    """Losses of training and validation, to the last bit; bpe is trained on the mixture once."""
    for home in ("through", "parted"):
        (tmp_path / home).mkdir()
    sections: dict[str, Any] = {
        "data": {"validation": 0.2, "tokenizer": "bpe"},
        "model": {"vocab": 262},
        "train": {"steps": 12, "eval_every": 4},
    }
    through = recipe(tmp_path / "through", **sections)
    planaria.train(through, progress=False)
    parted = recipe(tmp_path / "parted", **{**sections, "train": {"steps": 5, "eval_every": 4}})
    planaria.train(parted, progress=False)
    folder = tmp_path / "parted" / "runs" / "run"
    continued(folder, "pipeline.stages 2", "train.steps 9")
    continued(folder, "pipeline.stages 6", "train.steps 12")
    found, whole = (read_run(f) for f in (folder, tmp_path / "through" / "runs" / "run"))
    assert {m.step: m.loss for m in found.trained} == {m.step: m.loss for m in whole.trained}
    validated = {m.step: m.val_loss for m in found.validated}
    assert validated.items() >= {m.step: m.val_loss for m in whole.validated}.items()


def test_too_many_epochs_are_refused_before_the_run(tmp_path: Path) -> None:
    books = r"data\.mixture\.books\.epochs = 2: train\.steps = 101 uses 284 of its 140 samples: 2\.03"
    fix = r" epochs; set train\.steps to 100 or less, lower its weight, or raise"
    with pytest.raises(UserError, match=books + fix):
        planaria.train(recipe(tmp_path, train={"steps": 101}), progress=False)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match=r"data\.source = 'x': data\.mixture names the sources; remove it"):
        planaria.train(recipe(tmp_path, data={"source": "x"}), progress=False)


def test_a_changed_source_is_refused(tmp_path: Path) -> None:
    planaria.train(recipe(tmp_path, train={"steps": 2}), progress=False)
    folder = tmp_path / "runs" / "run"
    kept = run_folders.config_of(folder).data.mixture
    assert list(kept) == ["books", "code", "web"]
    (tmp_path / "code.txt").write_text("another text of another length " * 20)
    changed = r"the text of data\.mixture, or its tokenizer, has changed since this run started"
    with pytest.raises(UserError, match=changed):
        continued(folder, "train.steps 3")


def continued(folder: Path, *flags: str) -> list[str]:
    """Resume the run; return its messages."""
    output: list[str] = []
    settings = dict(flag.split() for flag in flags)
    planaria.train(folder, resume=True, settings=settings, progress=False, notify=output.append)
    return output
