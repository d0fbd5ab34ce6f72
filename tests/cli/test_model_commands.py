"""``planaria generate`` and ``eval`` on an exported model: streamed text, bounds, progress."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria import cli
from planaria.common.errors import UserError
from planaria.config.schema import DataConfig, ModelConfig
from planaria.data.tokenizer import load_tokenizer
from planaria.models.family import Pipelined
from planaria.models.huggingface import export_model
from planaria.models.llama_stages import Llama
from planaria.runtime.api.completer import complete
from planaria.runtime.api.stage_omission import evaluations, omissions
from support.command_line import refused

SHAPE = ModelConfig(vocab=257, dim=16, layers=4, heads=2, hidden=24, context=16, init_std=0.3)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = load_tokenizer(DataConfig(tokenizer="bytes"), 257, folder)
    tokenizer.save(folder / "tokenizer.json")
    export_model(Llama(SHAPE, seed=1), folder / "out", folder / "tokenizer.json", tokenizer.end)
    return folder / "out"


class Recorder(io.StringIO):
    """Records the text before each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[str] = []

    def flush(self) -> None:
        self.flushed.append(self.getvalue())


def generate(folder: Path, *words: str) -> int:
    return cli.run(["generate", str(folder), "--prompt", "a b", "--seed", "3", *words])


def test_text_is_streamed(exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", recorder := Recorder())
    assert generate(exported, "--tokens", "9") == 0
    assert recorder.getvalue() == complete(exported, "a b", 9, seed=3) + "\n"
    assert recorder.flushed[0] == "a b" and len(set(recorder.flushed)) > 2
    assert capsys.readouterr().err == ""


def test_generating_past_the_context_is_announced(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(exported, "--tokens", "30") == 0
    found = capsys.readouterr()
    line = "beyond its context of 16 tokens, the model sees only the newest 16, and each takes longer"
    assert found.err == f"planaria: {line}\n"
    assert found.out == complete(exported, "a b", 30, seed=3) + "\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--tokens", "999999999"), "tokens = 999999999; use 1 to 1,000,000"),
        (("--tokens", "0"), "tokens = 0"),
        (("--temperature", "-.5"), "temperature = -0.5 must be finite and at least 0"),
        (("--temperature", "inf"), "temperature = inf"),
        (("--temperature", "nan"), "temperature = nan"),
        (("--seed", "9" * 30), "more than 64 bits"),
        (("--top-k", "-3"), "top_k = -3"),
    ],
)
def test_numbers_out_of_range_are_refused_before_output(
    exported: Path, words: tuple[str, str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line in refused(capsys, "generate", exported, "--prompt", "a b", *words, silent=True)


@pytest.mark.parametrize("words", [("--omit", "0.5"), ("--subsets", "3"), ("--microbatches", "2")])
def test_stages_of_an_exported_model_cannot_be_left_out(exported: Path, words: tuple[str, str]) -> None:
    with pytest.raises(UserError, match=" ".join((*words, "applies to runs"))):
        cli.run(["eval", str(exported), *words])


def test_eval_shows_its_progress(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 60)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    assert cli.run(["eval", str(exported), "--text", str(tmp_path / "text.txt")]) == 0
    assert "75/75 samples" in stream.getvalue()


@pytest.mark.parametrize(("shares", "most"), [([], 9), ([0.25, 0.5], 3), ([0.25, 0.5, 0.75], 64)])
def test_the_number_of_evaluations_is_known_in_advance(shares: list[float], most: int) -> None:
    made: list[Any] = []
    model = Llama(SHAPE, stages=4, seed=1)
    tokens = torch.arange(16)[None]
    omissions(
        Pipelined(model.ends, [*model.stages]),
        lambda _: (tokens, tokens),
        1,
        shares,
        most,
        0,
        on_loss=lambda: made.append(1),
    )
    assert len(made) == evaluations(4, shares, most)
