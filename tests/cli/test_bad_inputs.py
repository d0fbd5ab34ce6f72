"""User errors of `planaria train` and related commands: one line that names the thing, and no files left behind."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from planaria.lab.commands.trace import trace as trace_program
from support.command_line import exit_code, refused
from support.command_mistakes import TEXT, files_of, mistake, train


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("name = ", ["bad.toml", "not valid TOML"]),
        ("[model]\ndimm = 3", ["bad.toml", "model.dimm", "unknown key", "did you mean 'dim'"]),
        ("[modle]\ndim = 3", ["bad.toml", "modle", "did you mean 'model'"]),
        ("[train]\nlr = 3.0", ["bad.toml", "train.lr", "did you mean 'optim.lr'"]),
        ('[pipeline]\norder = "2f2b"', ["bad.toml", "pipeline.order", "1f1b"]),
        ("[model]\ndim = 100\nheads = 8", ["model.dim = 100", "model.heads = 8"]),
        ("[model]\ndim = 20\nheads = 4", ["odd"]),
        ("[model]\nheads = 4\nkv_heads = 3", ["model.heads = 4", "model.kv_heads = 3"]),
        ("[model]\nlayers = 6\n[pipeline]\nstages = 4", ["model.layers = 6", "pipeline.stages = 4"]),
        ('[recovery]\nstrategy = "checkfre"', ["recovery.strategy", "did you mean 'checkfree'"]),
        (
            '[recovery]\nstrategy = "checkfree, chekpoint"',
            ["recovery.strategy = 'chekpoint'", "no such choice", "did you mean 'checkpoint'"],
        ),
        ('[recovery]\nstrategy = "echo, checkfree, echo"', ["strategy", "'echo' is listed twice", "remove one"]),
        (
            '[recovery]\nstrategy = "checkfree_plus"',
            ["recovery.strategy = 'checkfree_plus'", "routing.kind = 'swapped'", "'full'"],
        ),
        (
            '[routing]\nkind = "swapped"\n[pipeline]\nstages = 3\n[model]\nlayers = 3',
            ["routing.kind = 'swapped'", "4 block stages or more, not 3", "raise pipeline.stages"],
        ),
        ('[recovery]\nstrategy = "echo"\noptions.bits = 3', ["recovery.options.bits = 3", "2, 4 or 8"]),
        (
            '[recovery]\nstrategy = "echo"\n[recovery.options]\ndistance = 5',
            ["recovery.options.distance = 5", "use 1 to 4"],
        ),
        ("[recovery]\noptions.every = 2", ["recovery.options.every", "no option of 'checkfree'", "known here"]),
        ('[recovery]\nstrategy = "echo"\noptions.echo.evry = 2', ["recovery.options.echo.evry", "mean 'every'"]),
        ('[recovery]\notherwise = "rollback"', ["recovery.otherwise", "unknown key"]),
        ("[network]\nforward_s = [1.0, 2.0]", ["network.forward_s", "2 numbers"]),
        ('[train]\nprecision = "bf16"', ["bf16", "cuda"]),
    ],
)
def test_an_invalid_recipe_is_refused(
    home: Path, capfd: pytest.CaptureFixture[str], text: str, names: list[str]
) -> None:
    (home / "bad.toml").write_text(text)
    mistake(capfd, home, train(home, recipe="bad.toml"), *names)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--model.dim", "wide"], ["--model.dim wide", "integer"]),
        (["--train.steps", "0"], ["--train.steps 0", "greater than 0"]),
        (["--train.device", "cuda"], ["train.device", "CUDA"]),
        (["--train.device", "tpu"], ["--train.device tpu", "'cpu' or 'cuda'"]),
        (["--data.tokenizer", "no/such.json"], ["no/such.json"]),
        (["--model.vocab", "200"], ["model.vocab", "200", "257"]),
        (["--model.context", "90000"], ["model.context", "90001"]),
        (["--chaos.trace", "no/such.json"], ["no/such.json"]),
        (["--data.source", "nosuch://text"], ["data.source", "nosuch://text", "Protocol not known"]),
        (["--data.source", "memory://text"], ["data.source", "memory://text", "there is nothing"]),
        (["--data.mixture.a.source", "x"], ["data.mixture.a.weight", "is missing"]),
        (["--data.mixture.a.sauce", "x"], ["--data.mixture.a.sauce", "unknown flag"]),
        (["--routing.kind", "given", "--routing.routes", "[[0, 1, 9, 0], [0, 1, 0]]"], ["route 0", "stages 1..4"]),
        (["--routing.kind", "given", "--routing.routes", "[[0, 1, 0], [0, 2, 1, 2, 0]]"], ["route 1", "come twice"]),
        (["--routing.kind", "skipping", "--routing.skip", "0.75", "--routing.max_jump", "1"], ["routing.max_jump = 1"]),
        (["--routing.schedule", "no/such.json"], ["no/such.json", "planaria plan"]),
        (
            ["--engine", "fleet", "--exchange.replicas", "2", "--exchange.kind", "noloco", "--routing.mixed", "true"],
            ["routing.mixed = true", "--engine inline"],
        ),
        (
            ["--engine", "fleet", "--exchange.replicas", "2", "--recovery.meanwhile", "skip"],
            ["recovery.meanwhile = 'skip'", "another replica", "'wait'"],
        ),
        (
            ["--engine", "fleet", "--exchange.replicas", "2", "--checkpoint.every", "best"],
            ["checkpoint.every = 'best'", "exchange.replicas = 2", "number"],
        ),
        (
            ["--exchange.replicas", "2", "--exchange.kind", "noloco", "--exchange.options.alpha", "0.9"],
            ["exchange.options", "gamma = 0.7", "drift apart", "0.38"],
        ),
        (
            ["--exchange.replicas", "2", "--engine", "inline", "--recovery.strategy", "echo"],
            ["recovery.strategy = 'echo'", "exchange.replicas"],
        ),
        (["--model.ends_layers", "3"], ["model.layers = 4", "model.ends_layers = 3", "pipeline.stages = 4"]),
    ],
)
def test_an_invalid_flag_is_refused(
    home: Path, capfd: pytest.CaptureFixture[str], flags: list[str], names: list[str]
) -> None:
    if flags == ["--train.device", "cuda"] and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    mistake(capfd, home, train(home, *flags), *names)


TOPOLOGY = """
matrix = "twelve_cities"
[[nodes]]
site = "London"
count = 3
[[nodes]]
site = "Iowa"
count = 3
"""


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--skip", "0.25"], ["network.topology", "is not set"]),
        (["--network.topology", "no/such.toml"], ["no/such.toml", "no such topology"]),
        (["--network.topology", "here.toml", "--budget", "soon"], ["--budget soon", "60s"]),
        *((["--budget", text], [f"--budget {text}: use a time"]) for text in ("soon", "5", "0s", "nans")),
        (["--network.topology", "here.toml", "--routing.data_nodes", "5"], ["6 nodes", "pipeline.stages = 4"]),
        (
            ["--network.topology", "here.toml", "--pipeline.microbatches", "3", "--routing.data_nodes", "2"],
            ["3", "= 2"],
        ),
        (["--routing.search", "flows"], ["network.topology", "is not set"]),
        (["--routing.edge_cost", "sum"], ["routing.edge_cost = 'sum': only routing.search = 'flows' uses it"]),
        (
            ["--routing.search", "flows", "--routing.wait_for_gradient_sums", "true"],
            ["routing.search = 'flows' does not plan gradient sums"],
        ),
    ],
)
def test_an_invalid_planning_option_is_refused(
    home: Path, capfd: pytest.CaptureFixture[str], flags: list[str], names: list[str]
) -> None:
    (home / "here.toml").write_text(TOPOLOGY)
    mistake(capfd, home, ["plan", home / "good.toml", *flags], *names)


@pytest.mark.slow
def test_a_schedule_for_another_pipeline_is_refused(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "here.toml").write_text(TOPOLOGY)
    flags = ["--network.topology", "here.toml", "--pipeline.microbatches", "4", "--routing.data_nodes", "2"]
    code = exit_code(
        "plan", home / "good.toml", *flags, "--skip", "0.5", "--budget", "200moves", "--to", home / "s.json"
    )
    out, err = capfd.readouterr()
    assert code == 0, err
    assert "passes cost nothing, so only messages count: set network.forward_s" in out and "gap" not in out
    assert "the possible gain of another plan is unknown" in (home / "s.html").read_text()
    mistake(capfd, home, train(home, "--routing.schedule", "s.json", "--pipeline.stages", "2"), "s.json", "4 block")
    crooked = json.loads((home / "s.json").read_text())
    crooked["routes"][0][1] = crooked["routes"][0][2]
    (home / "crooked.json").write_text(json.dumps(crooked))
    mistake(capfd, home, train(home, "--routing.schedule", "crooked.json"), "crooked.json", "CC")


TRACED = ["--step-seconds", "1", "--stages", "4", "--steps", "10"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["trian"], ["trian"]),
        (["train"], ["recipe"]),
        (["train", "HOME/godo.toml"], ["godo.toml", "did you mean 'good.toml'"]),
        (["train", "HOME/good.toml", "--resume", "HOME/runs/small"], ["not both"]),
        (
            ["train", "HOME/good.toml", "--out", "HOME/runs", "--checkpoint", "step-1"],
            ["--checkpoint step-1", "--resume"],
        ),
        (["train", "--resume", "HOME/runs/small", "--dry-run"], ["--dry-run"]),
        (["train", "--resume", "HOME/nothing"], ["nothing", "not a run"]),
        (["generate", "HOME", "--prompt", "a"], ["HOME"]),
        (["report", "HOME"], ["HOME"]),
        (["run", "check", "HOME"], ["HOME"]),
        (["run", "chaos", "HOME", "--kill", "stage=1"], ["HOME"]),
        ([trace_program, "HOME/t.json", "--hourly", "1.5", *TRACED], ["hourly"]),
        (
            [
                trace_program,
                "HOME/t.json",
                "--hourly",
                "0.5",
                *TRACED,
                "--adjacent-probability",
                "0.3",
                "--forbid-adjacent",
            ],
            ["adjacent_probability = 0.3"],
        ),
    ],
)
def test_invalid_arguments_are_refused(
    home: Path, capfd: pytest.CaptureFixture[str], words: list[Any], names: list[str]
) -> None:
    def placed(texts: list[Any]) -> list[Any]:
        return [text.replace("HOME", str(home)) if isinstance(text, str) else text for text in texts]

    mistake(capfd, home, [*placed(words)], *placed(names))


@pytest.mark.slow
def test_a_diverging_loss_ends_the_run_with_advice(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "optim.lr" in refused(capfd, *train(home, "--optim.lr", "1e30", "--train.steps", "20"))


@pytest.mark.parametrize(
    ("name", "content", "names"),
    [
        ("empty/", b"", []),
        ("picture.txt", b"\xff\xd8\xff\xe0" * 100, []),
        ("short.txt", b"too short", ["train", "context"]),
        ("lines.jsonl", b'{"txt": "a"}', ["txt", "text"]),
        ("lines.jsonl", b"{broken", [":2"]),
        ("tokenizer.json", b"{not json", []),
    ],
)
def test_invalid_data_is_refused(
    home: Path, capfd: pytest.CaptureFixture[str], name: str, content: bytes, names: list[str]
) -> None:
    path = home / name
    if name.endswith("/"):
        path.mkdir()
    elif name.endswith(".jsonl"):
        path.write_text(json.dumps({"text": TEXT}) + "\n" + content.decode() + "\n")
    else:
        path.write_bytes(content)
    flag = "--data.tokenizer" if name == "tokenizer.json" else "--data.source"
    expected = names if name == "short.txt" else [path.name, *names]
    mistake(capfd, home, train(home, flag, str(path)), *expected)


@pytest.mark.parametrize(
    ("trace", "names"),
    [
        ("{", ["trace.json"]),
        ('{"faults": [{"step": 1, "stage": 9}]}', ["trace.json", "stage 9", "0..4"]),
        ('{"faults": [{"step": 1, "stag": 2}]}', ["trace.json", "stag", "did you mean 'stage'"]),
        ('{"faults": [{"step": -1, "stage": 2}]}', ["trace.json", "step"]),
        (
            '{"faults": [{"step": 1, "stage": 2, "signal": "corrupt_update"}]}',
            ["trace.json", "'corrupt_update'", "one replica"],
        ),
        (
            '{"faults": [{"step": 1, "stage": 2, "signal": "corrupt_update", "attack": "ipn"}]}',
            ["faults.0", "mean 'ipm'"],
        ),
    ],
)
def test_an_invalid_trace_is_refused(
    home: Path, capfd: pytest.CaptureFixture[str], trace: str, names: list[str]
) -> None:
    (home / "trace.json").write_text(trace)
    for more in ([], ["--dry-run"]):
        mistake(capfd, home, train(home, "--chaos.trace", str(home / "trace.json"), *more), *names)


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(("trace", "fix"), [("absent.json", "use a trace file"), ("", "or none")])
def test_a_missing_trace_is_refused(
    trace: str, fix: str, more: list[str], home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [trace] if trace else ["--chaos.trace", "is empty"]
    mistake(capfd, home, train(home, "--chaos.trace", trace, *more), *names, fix)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--engine", "fleet", "--fleet.port", "TAKEN"], ["fleet.port = ", "Address already in use", "another port"]),
        (["--engine", "fleet", "--fleet.port", "TAKEN", "--checkpoint.store", "STORE"], ["another port"]),
        (
            ["--engine", "fleet", "--fleet.host", "192.0.2.1"],
            ["'192.0.2.1'", "set fleet.host to an address of this mac"],
        ),
        (["--model.dim", "1000000"], ["would take", "GB are free", "choose a smaller model"]),
        (
            ["--engine", "fleet", "--model.dim", "1000000", "--fleet.spares", "0"],
            ["would take", "choose a smaller model"],
        ),
    ],
)
def test_a_failed_start_leaves_no_files_and_frees_the_name(
    home: Path, capfd: pytest.CaptureFixture[str], flags: list[str], names: list[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        places = {"TAKEN": str(taken.getsockname()[1]), "STORE": str(home / "store")}
        for _ in range(1 + ("STORE" in flags)):  # nor a claim in a store
            line = mistake(capfd, home, train(home, *(places.get(flag, flag) for flag in flags)), *names)
    assert "resume" not in line and ("another port" in line) == ("TAKEN" in flags)


@pytest.mark.slow
def test_an_unrecoverable_loss_suggests_a_checkpoint(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "trace.json").write_text('{"faults": [{"step": 1, "stage": 0}]}')
    flags = ["--chaos.trace", str(home / "trace.json"), "--checkpoint.every", "1"]
    ended = {}
    for strategy in ("checkfree", "checkfree, checkpoint"):
        code = exit_code(*train(home, *flags, "--recovery.strategy", strategy))
        ended[code] = capfd.readouterr().err
    assert ended.keys() == {0, 1}, ended
    assert "add ', checkpoint': --recovery.strategy 'checkfree, checkpoint'" in ended[1]


@pytest.fixture
def run(home: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    """A finished run of two steps."""
    assert exit_code(*train(home)) == 0
    capfd.readouterr()
    return home / "runs" / "small"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        *((["eval", "RUN", f"--omit={omit}"], ["--omit", "of 4 block stages"]) for omit in ("all", "1.0", "0.01")),
        *((["eval", "RUN", f"--omit={omit}"], ["--omit", "of 4 block stages"]) for omit in ("-0.5", "0.25,nan")),
        (["train", "--resume", "RUN"], ["all 2 steps are done", "--train.steps"]),
        (["train", "--resume", "RUN", "--model.dim", "64"], ["--model.dim 64", "cannot change"]),
        (["train", "--resume", "RUN", "--checkpoint", "step-7"], ["step-7", "there are: step-00000002"]),
        (["export", "RUN", "--to", "RUN/../../cache"], ["cache"]),
        (["run", "chaos", "RUN", "--kill", "stage=2", "--resume-after", "1"], ["--resume-after", "--stop"]),
        pytest.param(
            ["run", "chaos", "RUN", "--kill", "stage=2"],
            ["small", "the run is not being trained"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["run", "chaos", "RUN", "--kill", "controller"],
            ["small", "the run is not being trained"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_finished_run_cannot_do_is_refused(
    run: Path, home: Path, capfd: pytest.CaptureFixture[str], words: list[str], names: list[str]
) -> None:
    mistake(capfd, home, [word.replace("RUN", str(run)) for word in words], *names)


def test_resuming_a_run_that_was_killed_before_its_export_exports_it(
    home: Path, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = load_file(run / "model" / "model.safetensors")
    shutil.rmtree(run / "model")
    (run / ".reserve").write_bytes(b"room")
    assert exit_code("train", "--resume", run) == 0
    assert str(run / "model") in capfd.readouterr().out
    after = load_file(run / "model" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert not (run / ".reserve").exists()


def test_resuming_with_a_changed_corpus_is_refused(home: Path, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "text.txt").write_text(TEXT + "and something more\n")
    names = ["text.txt", "data.source", "start a new run"]
    mistake(capfd, home, ["train", "--resume", run, "--train.steps", "4", "--quiet"], *names)


@pytest.mark.parametrize(
    ("harm", "names"),
    [
        (lambda f: (f / "manifest.json").write_text("{"), ["manifest.json", "damaged"]),
        (lambda f: (f / "manifest.json").unlink(), ["no manifest.json"]),
        (lambda f: (f / "stage-0002.safetensors").unlink(), ["stage-0002.safetensors", "missing"]),
        (lambda f: os.truncate(f / "stage-0002.safetensors", 1000), ["stage-0002.safetensors", "damaged"]),
        (
            lambda f: shutil.copy(f / "stage-0001.safetensors", f / "stage-0002.safetensors"),
            ["stage-0002.safetensors", "holds stage 1"],
        ),
        (lambda f: (f.parents[1] / "config.json").write_text("{"), ["config.json"]),
    ],
)
def test_resuming_a_damaged_run_is_refused(
    home: Path, run: Path, capfd: pytest.CaptureFixture[str], harm: Callable[[Path], None], names: list[str]
) -> None:
    harm(sorted((run / "checkpoints").glob("step-*"))[-1])
    mistake(capfd, home, ["train", "--resume", run, "--train.steps", "4", "--quiet"], *names)


@pytest.mark.parametrize("engine", [pytest.param("inline", marks=pytest.mark.slow), "fleet"])
def test_a_full_disk_harms_no_checkpoint(home: Path, run: Path, engine: str) -> None:
    """A file size limit of 30 kB looks like a full disk to the process that writes a stage."""
    arguments = ["train", "--resume", str(run), "--train.steps", "4", "--quiet", "--engine", engine]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))"
    code = f"{limit}\nfrom planaria.cli import main\nif __name__ == '__main__': main({arguments!r})"
    (home / "limited.py").write_text(code)
    checkpoints = files_of(run / "checkpoints")
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # the limit would truncate the bytecode of imported modules
    done = subprocess.run([sys.executable, home / "limited.py"], capture_output=True, text=True, timeout=110, env=env)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "cannot write" in done.stderr and "stage-" in done.stderr
    sealed = {f for f in files_of(run / "checkpoints") if ".unfinished" not in f}
    assert sealed == checkpoints, "a checkpoint was harmed, or half a one appeared"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        pytest.param("{broken\n", "events.jsonl:2", marks=pytest.mark.slow),
        ("", "events.jsonl has no start of a run"),
    ],
)
def test_replaying_a_damaged_log_is_refused(
    home: Path, run: Path, capfd: pytest.CaptureFixture[str], content: str, complaint: str
) -> None:
    first, *rest = (run / "events.jsonl").read_text().splitlines(keepends=True)
    if content:
        (run / "events.jsonl").write_text("".join([first, content, *rest]))
    else:
        for name in ("events", "spans", "metrics"):
            (run / f"{name}.jsonl").write_text("")
    mistake(capfd, home, ["run", "check", run], complaint)


@pytest.mark.slow
def test_a_run_with_a_trace_beside_its_recipe_can_be_resumed(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "trace.json").write_text('{"faults": [{"step": 1, "stage": 2}, {"step": 3, "stage": 3}]}')
    recipe = (home / "good.toml").read_text() + '[chaos]\ntrace = "trace.json"\n'
    (home / "good.toml").write_text(recipe)
    for arguments in (train(home), ["train", "--resume", home / "runs" / "small", "--train.steps", "4", "--quiet"]):
        assert exit_code(*arguments) == 0, capfd.readouterr().err
    log = (home / "runs" / "small" / "events.jsonl").read_text()
    assert log.count('"fault_injected"') == 2, "each fault struck once"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('compress = "top0%"', ["exchange.compress.keep = 0.0", "greater than 0"]),
        ('compress = "ef14:top150%"', ["exchange.compress.keep = 1.5", "less than or equal to 1"]),
        (
            'compress = { kind = "topk", feedback = "econtrol", eta = 0.1 }',
            ["eta = 0.1 is above the compressor's delta = 0.01", "lower it", "force = true"],
        ),
        ('compress = "econtrol:top1%"\nkind = "noloco"', ["estimate of every member", "use ef14"]),
        ('compress = "ef21:top1%"\nkind = "diloco"', ["estimate of every member", "use ef14"]),
        ('compress = "8bits"\n[routing]\nmixed = true', ["routing.mixed = true", "remove one of them"]),
        ("options.bits = 8\n[routing]\nmixed = true", ["routing.mixed = true", "remove one of them"]),
        (
            'compress = "rand0.0001%"',
            ["exchange.compress.keep = 1e-06", "9,632 numbers of stage 0", "set it to 0.00011 or more"],
        ),
        ('compress = "8bits"\nkind = "local"', ["'local' has no messages to compress", "remove it"]),
    ],
)
def test_invalid_compression_is_refused(
    home: Path, capfd: pytest.CaptureFixture[str], text: str, names: list[str]
) -> None:
    (home / "bad.toml").write_text((home / "good.toml").read_text() + f"[exchange]\nreplicas = 2\n{text}\n")
    mistake(capfd, home, train(home, recipe="bad.toml"), *names)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ("econtrol:top5%", "econtrol:top1%", ["exchange.compress = 'econtrol:top1%' (was exchange.compress ="]),
        ("ef14:8bits", "ef21:8bits", ["belongs to the old", "--train.start"]),
        ("ef14:8bits", "", ["exchange.options.bits = 32 (was exchange.compress = 'ef14:8bits')"]),
    ],
)
def test_resuming_with_another_compressor_is_refused_unless_replicas_change_too(
    home: Path, capfd: pytest.CaptureFixture[str], first: str, second: str, names: list[str]
) -> None:
    assert exit_code(*train(home, "--exchange.replicas", "2", "--exchange.compress", first)) == 0
    capfd.readouterr()
    run, more = home / "runs" / "small", ["--train.steps", "4", "--quiet"]
    mistake(capfd, home, ["train", "--resume", run, *more, "--exchange.compress", second], *names)
    # With another number of replicas, errors are divided among them and estimates start anew.
    flags = [*more, "--exchange.compress", second, "--exchange.replicas", "3"]
    assert exit_code("train", "--resume", run, *flags) == 0, capfd.readouterr().err


BYTES = os.fsdecode(b"caf\xe9")
"""a name whose bytes are not UTF-8, as Python gives it to programs"""


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["train", "demo", "--name", BYTES], "--name"),
        (["train", "demo", f"--data.source={BYTES}"], "--data.source"),
        (["train", "demo", "--data.mixture.x.source", BYTES], "--data.mixture.x.source"),
        (["generate", "runs/demo", "--prompt", BYTES], "--prompt"),
        (["generate", BYTES, "--prompt", "x"], "argument 2"),
        (["swarm", "join", BYTES], "argument 3"),
        (["train", "demo", f"--{BYTES}", "x"], "argument 3"),
        ([BYTES], "argument 1"),
    ],
)
def test_arguments_that_are_not_utf8_are_refused_by_flag(
    capfd: pytest.CaptureFixture[str], home: Path, words: list[str | Path], name: str
) -> None:
    line = mistake(capfd, home, words)
    assert line.startswith(f"planaria: {name}: '") and "caf\\udce9" in line and "is not UTF-8" in line


@pytest.mark.parametrize("place", ["the working directory", "$HOME", "$XDG_CACHE_HOME", "$TMPDIR"])
def test_folders_that_are_not_utf8_are_refused(
    capfd: pytest.CaptureFixture[str], home: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := home / BYTES).mkdir()
    if place.startswith("$"):
        monkeypatch.setenv(place[1:], str(folder))
    else:
        monkeypatch.chdir(folder)
    line = mistake(capfd, home, ["train", home / "good.toml"])
    assert line.startswith(f"planaria: {place}: '") and "is not UTF-8; rename the folder" in line


def test_a_removed_working_directory_is_refused(
    capfd: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := home / "gone").mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert "the working directory was removed" in mistake(capfd, home, ["train", home / "good.toml"])


STORED = 'train = { steps = 100, eval_every = 10 }\ndata = { source = "stdlib" }\n'
STORE = 'checkpoint = { store = "memory://runs" }\n'
DOMAINS = "[experts.domains]\n" + "".join(f'{name} = {{ source = "stdlib:{name}*.py" }}\n' for name in "abc")


@pytest.mark.parametrize(
    ("command", "recipe", "place"),
    [
        ("compare", f"{STORED}{STORE}[compare]\nseeds = [1]\n[compare.arms.one]\n", "r.toml: checkpoint.store: races"),
        ("compare", f"{STORED}[compare.arms.one]\n{STORE}", "r.toml: compare.arms.one: checkpoint.store: races keep"),
        ("experts train", f"{STORED}{STORE}{DOMAINS}", "r.toml: checkpoint.store supports single runs"),
    ],
)
def test_a_store_is_refused_by_commands_of_several_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, recipe: str, place: str
) -> None:
    (tmp_path / "r.toml").write_text(recipe)
    line = refused(capfd, *command.split(), tmp_path / "r.toml", "--quiet", "--out", tmp_path / "runs")
    assert place in line and "remove it" in line
    assert not (tmp_path / "runs").exists()


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
