"""``planaria train`` prints the table of its stages before workers start, and ``--dry-run`` prints it alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from planaria import cli
from planaria.common.errors import UserError
from planaria.control.log.reader import read_run
from planaria.report.run.stage_peaks import stage_peaks

RECIPE = """
name = "small"
model = { vocab = 512, dim = 384, layers = 4, heads = 6, hidden = 1024, context = 128 }
pipeline = { stages = 2, microbatches = 4, microbatch_size = 2 }
data = { source = "text.txt", tokenizer = "bytes", cache = "cache" }
train = { steps = 3, eval_every = 0 }
checkpoint = { every = 0 }
recovery = { strategy = "checkpoint" }
observe = { trackers = "" }
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    (tmp_path / "small.toml").write_text(RECIPE)
    return tmp_path


def table_of(output: str) -> list[list[str]]:
    """Return the words of the lines about stages."""
    lines = [line.removeprefix("# ") for line in output.splitlines()]
    first = next(n for n, line in enumerate(lines) if line.startswith("stage  layers"))
    return [line.split() for line in lines[first + 1 : first + 4]]


def test_a_dry_run_prints_the_table_and_starts_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "small.toml", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert [row[:2] for row in table_of(output)] == [["ends", "–"], ["1", "0–1"], ["2", "2–3"]]
    assert "# time          unknown until step 3" in output and "# memory        this machine: 4 workers" in output
    assert not (home / "runs").exists()
    assert cli.run(["train", "small.toml", "--dry-run", "--engine", "inline"]) == 0
    assert "this machine: 1 worker, about" in capsys.readouterr().out


def test_too_much_memory_is_refused_with_the_table_before_anything_starts(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--pipeline.microbatch_size", "256", "--model.context", "8192", "--model.dim", "3840"]
    for more in (["--dry-run"], []):
        with pytest.raises(
            UserError, match=r"4 workers on this machine would take .* GB are free: set train.recompute"
        ):
            cli.run(["train", "small.toml", *words, *more])
        output = capsys.readouterr().out
        assert [row[:2] for row in table_of(output)] == [["ends", "–"], ["1", "0–1"], ["2", "2–3"]]
        assert ("microbatch_size = 256" in output) == bool(more)
    assert not (home / "runs").exists()


@pytest.mark.parametrize(
    ("content", "flags", "refusal"),
    [
        (None, [], "there is no 'data.jsonl'"),
        ("", [], "holds no UTF-8 text"),
        ('{"txt": "a"}', [], "data.jsonl:1: no field 'text' .did you mean 'txt'"),
        ('{"text": "a"}\n{"text": 3}', [], "data.jsonl:2: field 'text' holds int, not text"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}', [], "data.jsonl:2: no 'completion'"),
        ('{"messages": [{"role": "user", "content": "a"}]}', [], "has no chat template"),
        ('{"messages": [{"role": "user"}]}', ["--data.template", "chat.jinja"], r"messages\[0\]: its content is not"),
        ('{"messages": [{"from": "user"}]}', ["--data.template", "chat.jinja"], r"messages\[0\]: not an object with"),
    ],
)
def test_a_dry_run_checks_the_first_records(home: Path, content: str | None, flags: list[str], refusal: str) -> None:
    (home / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    if content is not None:
        (home / "data.jsonl").write_text(content)
    before = sorted(home.iterdir())
    words = ["train", "small.toml", "--dry-run", "--data.source", "data.jsonl", "--data.tokenizer", "bpe"]
    with pytest.raises(UserError, match=refusal):
        cli.run([*words, *flags])
    assert sorted(home.iterdir()) == before


def test_a_dry_run_reads_no_later_records(home: Path) -> None:
    (home / "data.jsonl").write_text('{"text": "%s"}\n' % ("a" * 1000) * 400 + "damaged\n")
    assert cli.run(["train", "small.toml", "--dry-run", "--data.source", "data.jsonl"]) == 0


@pytest.mark.timeout(300)
def test_the_memory_of_one_process_is_predicted(home: Path) -> None:
    words = ["train", "small.toml", "--engine", "inline", "--model.dim", "48", "--model.hidden", "128"]
    output = subprocess.run(
        [sys.executable, "-m", "planaria", *words], cwd=home, capture_output=True, text=True, check=True
    ).stdout
    predicted = float(output.partition("1 worker, about ")[2].partition(" MB")[0])
    (peak,) = stage_peaks(read_run(home / "runs" / "small"))
    assert 0.9 <= predicted / (peak.bytes / 1e6) <= 1.25


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["checkpoint", "redundant"])
def test_the_table_is_printed_first_and_its_memory_is_measured(home: Path, strategy: str) -> None:
    """With ``redundant``, a worker also keeps the activations of its successor's microbatches."""
    words = [sys.executable, "-m", "planaria", "train", "small.toml", "--recovery.strategy", strategy]
    output = subprocess.run(words, cwd=home, capture_output=True, text=True, check=True).stdout
    rows = table_of(output)
    assert [row[0] for row in rows] == ["ends", "1", "2"] and output.index("stage  layers") < output.index("step ")
    record = read_run(home / "runs" / "small")
    peaks = {peak.where: peak for peak in stage_peaks(record)}
    assert len(peaks) == 3 and all(peak.predicted for peak in peaks.values())
    shown = {f"stage {row[0]}" if row[0].isdigit() else "stage 0 (ends)": float(row[6]) for row in rows}
    assert {where: round(peak.predicted / 1e6) for where, peak in peaks.items()} == shown
    ends, fullest = (
        peaks["stage 0 (ends)"],
        max((p for p in peaks.values() if "ends" not in p.where), key=lambda p: p.bytes),
    )
    for peak in (ends, fullest):
        assert 0.8 <= peak.predicted / peak.bytes <= 1.25
    if strategy == "redundant":  # the line on copies states what they send
        return
    sent = dict.fromkeys(range(3), 0)
    for _, work in record.worked:
        sent[work.node] += sum(work.sent_bytes.values())
    assert all(row[-2:] == [f"{count / 3 / 1e6:.2f}", "MB"] for row, count in zip(rows, sent.values(), strict=True))
