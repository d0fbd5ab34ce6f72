"""``planaria export`` and ``checkpoint convert --from``, and training resumed from an imported checkpoint."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.hostile import CommandResult, carry_out

import planaria
from planaria.control.log.reader import read_run
from planaria.faults.trace import Fault, Trace, trace_text
from planaria.models.huggingface import import_model
from planaria.report.run.sample_ledger import prove_exactly_once
from planaria.runtime.checkpoint.foreign import universal
from planaria.runtime.checkpoint.loading import ParameterState, load_model
from planaria.runtime.checkpoint.store import CheckpointStore

RECIPE = """
engine = "inline"
model = {{ vocab = 260, dim = 16, layers = 4, heads = 4, kv_heads = 2, hidden = 24, context = 8 }}
pipeline = {{ stages = 4, microbatches = 2, microbatch_size = 2 }}
data = {{ source = "{corpus}", tokenizer = "bytes", cache = "{cache}" }}
optim = {{ clip = 0.0, warmup = 3, schedule = "cosine" }}
train = {{ steps = 6, eval_every = 0 }}
checkpoint = {{ every = 3 }}
observe = {{ trackers = "" }}
fleet = {{ spares = 0 }}
"""

CONVERT = ("checkpoint", "convert")
DCP = ("--from", "dcp", "--recipe", "TOML")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of four stages, ``run``, and one with a stage rebuilt by CheckFree, ``rebuilt``."""
    home, rng = tmp_path_factory.mktemp("foreign"), random.Random(34107)
    corpus = home / "corpus.txt"
    corpus.write_text(" ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(3000)))
    (home / "run.toml").write_text(RECIPE.format(corpus=corpus, cache=home / "cache"))
    (home / "trace.json").write_text(trace_text(Trace(faults=(Fault(step=2, stage=2),))))
    plain = {"out": str(home / "runs"), "name": "run"}
    planaria.train(home / "run.toml", progress=False, settings=plain)
    rebuilt = plain | {"name": "rebuilt", "chaos.trace": str(home / "trace.json")}
    planaria.train(home / "run.toml", progress=False, settings=rebuilt)
    return home


def call(*words: object) -> CommandResult:
    return carry_out([str(word) for word in words], limit_s=90.0)


def done(*words: object) -> str:
    result = call(*words)
    assert result.code == 0, result.err
    return result.out


def losses(run: Path) -> dict[int, float]:
    return {m.step: m.loss for m in read_run(run).trained}


def resumed(run: Path, *flags: str) -> dict[int, float]:
    """Train four more steps; return their losses."""
    done("train", "--resume", run, "--train.steps", "10", "--quiet", *flags)
    assert prove_exactly_once(read_run(run)) == []
    return {step: loss for step, loss in losses(run).items() if step >= 6}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("source", "kind", "engine"),
    [
        ("run", "universal", "inline"),
        ("rebuilt", "dcp", "inline"),
        pytest.param("run", "dcp", "fleet", marks=pytest.mark.slow),
    ],
)
def test_an_imported_checkpoint_resumes_like_a_native_one(
    home: Path, tmp_path: Path, source: str, kind: str, engine: str
) -> None:
    """Exported at 4 stages and imported at 2, the losses equal a native resumption to the last bit.

    DCP also keeps the clock and learning-rate scale of the rebuilt stage.
    """
    native = Path(shutil.copytree(home / "runs" / source, tmp_path / "native"))
    assert done("export", native, "--format", kind, "--to", tmp_path / "out") == f"{tmp_path / 'out'}\n"
    flags = ["--pipeline.stages", "2"]
    made, name = tmp_path / "runs" / "back", ["--out", tmp_path / "runs", "--name", "back"]
    printed = done(
        *CONVERT, tmp_path / "out", "--recipe", home / "run.toml", "--from", kind, *name, *flags, "--engine", engine
    )
    assert printed == f"{tmp_path / 'out'}: step 6\nresume with   planaria train --resume {made}\n"
    assert "unchanged" in done("checkpoint", "show", made, "--verify")
    expected = resumed(native, *flags)
    assert expected.keys() == {6, 7, 8, 9} and resumed(made) == expected


@pytest.mark.slow
def test_an_import_can_take_the_configuration_of_a_run(home: Path, tmp_path: Path) -> None:
    """An earlier checkpoint keeps the run's faults after their file was removed."""
    run = home / "runs" / "rebuilt"
    (home / "trace.json").unlink(missing_ok=True)
    done("export", run, "--checkpoint", "step-00000003", "--format", "dcp", "--to", tmp_path / "out")
    printed = done(*CONVERT, tmp_path / "out", "--recipe", run, "--from", "dcp", "--out", tmp_path / "runs")
    assert "step 3" in printed
    made = tmp_path / "runs" / "rebuilt"
    assert {path.name for path in made.iterdir()} == {"config.json", "planaria.sha256", "trace.json", "checkpoints"}
    assert [path.name for path in (made / "checkpoints").iterdir()] == ["step-00000003"]
    done("train", "--resume", made, "--train.steps", "6", "--quiet")
    assert losses(made) == {step: loss for step, loss in losses(run).items() if step >= 3}
    again = done(*CONVERT, tmp_path / "out", "--recipe", run, "--from", "dcp", "--out", tmp_path / "runs")
    assert again.endswith(f"planaria train --resume {tmp_path / 'runs' / 'rebuilt-2'}\n")


def test_an_export_to_hugging_face_in_bf16(home: Path, tmp_path: Path) -> None:
    run, whole = home / "runs" / "run", import_model(home / "runs" / "run" / "model").global_state()
    done("export", run, "--format", "hf", "--precision", "bf16", "--to", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    found = import_model(tmp_path / "hf").global_state()
    assert all(torch.equal(found[name], tensor.bfloat16().float()) for name, tensor in whole.items())


def test_training_starts_from_exported_shards(home: Path, tmp_path: Path) -> None:
    from planaria.runtime.api.import_export import export_run

    sharded = export_run(home / "runs" / "run", tmp_path / "hf", largest=8 << 10)
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    flags = [home / "run.toml", "--train.start", sharded, "--out", tmp_path / "runs", "--name", "child", "--quiet"]
    done("train", *flags, "--checkpoint.keep", "9")
    first = CheckpointStore(tmp_path / "runs" / "child" / "checkpoints").list()[0]
    found, whole = load_model(first).global_state(), import_model(home / "runs" / "run" / "model").global_state()
    assert first.step == 0 and all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    (sharded / "config.json").write_text((sharded / "config.json").read_text() + "\n")
    assert "config.json has changed since it was written" in call("train", *flags).err
    assert "config.json: accepted in its current state" in done("run", "check", sharded, "--accept")


def test_an_export_that_fails_leaves_nothing(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = ParameterState.read, 0

    def full(self: ParameterState, kind: str) -> torch.Tensor:
        nonlocal count
        count += 1
        if count > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, kind)

    monkeypatch.setattr(ParameterState, "read", full)
    for kind in ("dcp", "universal", "hf"):
        count = 0
        result = call("export", home / "runs" / "run", "--format", kind, "--to", tmp_path / "deep" / kind)
        assert result.kind and "cannot write" in result.err and "No space left on device" in result.err, result.err
        assert list((tmp_path / "deep").iterdir()) == []


@pytest.mark.slow
def test_an_import_that_fails_leaves_nothing(home: Path, tmp_path: Path) -> None:
    done("export", home / "runs" / "run", "--format", "universal", "--to", tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*/zero/model.layers.3.mlp.up_proj.weight/exp_avg.pt")
    path.write_bytes(path.read_bytes()[:-40])
    given = ["--recipe", home / "run.toml", "--from", "universal", "--out", tmp_path / "runs"]
    result = call(*CONVERT, tmp_path / "out", *given)
    assert result.kind and str(path) in result.err and list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "RUN", "--to", "x", "--format", "gguf"], "'gguf' is not one of 'hf', 'dcp', 'universal'"),
        ([*CONVERT, "RUN", "--recipe", "TOML"], "--recipe TOML requires --from"),
        (["export", "RUN", "--to", "RUN", "--format", "dcp"], "exists and is not an empty folder"),
        (["export", "RUN", "--to", "x", "--format", "dcp", "--checkpoint", "step-7"], "no such checkpoint"),
        (
            ["export", "RUN", "--to", "x", "--format", "dcp", "--precision", "bf16"],
            "--precision bf16 requires --format hf",
        ),
        (["export", "RUN", "--to", "x", "--format", "universal", "--shard", "9"], "--shard 9 requires --format hf"),
        (["export", "RUN", "--to", "x", "--format", "hf", "--shard", "0"], "greater than or equal to 1"),
        (["export", "nowhere", "--to", "x", "--format", "dcp"], "not a run"),
        (["export", "REBUILT", "--to", "x", "--format", "universal"], "a single step"),
        ([*CONVERT, "RUN/model", "--recipe", "TOML", "--from", "hf"], "--train.start RUN/model"),
        ([*CONVERT, "nowhere", *DCP], "nowhere is not a folder"),
        ([*CONVERT, "RUN/model", *DCP], ".metadata: missing, or not a file"),
        (
            [*CONVERT, "RUN/model", "--recipe", "TOML", "--from", "universal"],
            "has neither latest_universal nor zero",
        ),
        ([*CONVERT, "RUN", *DCP, "--engine", "simulate"], "no single model"),
        ([*CONVERT, "RUN", *DCP, "--train.start", "y"], "train.start = 'y'"),
        ([*CONVERT, "RUN", *DCP, "--pipeline.stages", "3"], "does not divide"),
    ],
)
def test_an_invalid_command_is_refused_in_one_line(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)  # other tests may leave an "x" where all of them run
    names = {
        "RUN": home / "runs" / "run",
        "REBUILT": home / "runs" / "rebuilt",
        "TOML": home / "run.toml",
        "OUT": tmp_path,
    }

    def put(text: str) -> str:
        for name, path in names.items():
            text = text.replace(name, str(path))
        return text

    result = call(*map(put, words), *(["--out", tmp_path] if "--from" in words else []))
    assert result.code == 2 and result.kind and put(message) in result.err, result.err
    assert list(tmp_path.iterdir()) == []


def test_a_partial_checkpoint_is_not_exported(home: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(home / "runs" / "run", tmp_path / "run"))
    path = run / "checkpoints" / "step-00000006" / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text())
    del manifest["sha256"]
    path.write_text(json.dumps(manifest | {"stages": [0, 1, 3, 4]}))
    result = call("export", run, "--checkpoint", "step-00000006", "--format", "dcp", "--to", tmp_path / "x")
    assert result.kind and "stages [2] are missing" in result.err


@pytest.mark.slow
def test_an_export_reports_the_state_it_leaves_out(home: Path, tmp_path: Path) -> None:
    flags = ["--exchange.replicas", "2", "--exchange.kind", "noloco", "--out", tmp_path, "--name", "two", "--quiet"]
    done("train", home / "run.toml", *flags)
    printed = done("export", tmp_path / "two", "--format", "universal", "--to", tmp_path / "out")
    assert printed.splitlines()[0] == "step-00000006: the mean model of 2 replicas, without outer state"
    assert universal.LATEST in {path.name for path in (tmp_path / "out").iterdir()}
