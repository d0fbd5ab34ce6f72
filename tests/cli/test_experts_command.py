"""``planaria experts train``: train each expert in its own process, which may die, then use and edit the ensemble."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from planaria import cli
from planaria.common.errors import UserError
from planaria.config.schema import DataConfig
from planaria.data.shards import tokenise_corpus
from planaria.lab.commands import ensemble as commands
from planaria.lab.commands import experts as experts_command
from planaria.lab.experts.ensemble import Ensemble
from planaria.lab.experts.experts_results import ArmResult, Results
from planaria.lab.experts.log_probabilities import domain_samples, windows
from planaria.lab.experts.scoring import score
from planaria.lab.report.experts_report import show_results, write_experts_report
from planaria.models.generate import generate
from planaria.trials import result_cache
from support.mixture_checks import check_generation, check_likeliest, next_log_p

pytestmark = pytest.mark.timeout(300)
"""A dozen processes start one after the other."""

RECIPE = """
engine = "inline"
model = {{ vocab = 257, dim = 16, layers = 1, heads = 2, context = 32 }}
pipeline = {{ stages = 1, microbatches = 1, microbatch_size = 4 }}
data = {{ tokenizer = "bytes", cache = "{cache}" }}
train = {{ eval_every = 0 }}
checkpoint = {{ every = 2 }}

[experts]
seeds = [1]
sizes = {{ S = 16, M = 32, L = 48 }}
steps = [4, 6, 8]
max_chars = 60000
test_windows = 8
retries = 1
seed = {{ steps = 10 }}
probe = {{ steps = 8 }}
mixture = {{ prefix = 8 }}

[experts.domains]
tables = {{ source = "stdlib:encodings/cp*.py" }}
topics = {{ source = "stdlib:pydoc_data/topics.py", begins = "^ *'[^' ]+': " }}
code = {{ source = "stdlib:*.py" }}

[experts.untrained]
asyncio = {{ source = "stdlib:asyncio/*.py" }}
"""

TOPICS = next(line for line in RECIPE.splitlines() if line.startswith("topics"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its finished run, ``runs/tiny``."""
    folder = tmp_path_factory.mktemp("experts")
    (folder / "tiny.toml").write_text(RECIPE.format(cache=folder / "cache"))
    assert cli.run(["experts", "train", str(folder / "tiny.toml"), "--quiet", "--out", str(folder / "runs")]) == 0
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(made / "runs" / "tiny", tmp_path / "runs" / "tiny"))


def results(run: Path) -> Results:
    return Results.model_validate_json((run / "results.json").read_text())


def trained(folder: Path, *replacements: tuple[str, str]) -> Path:
    """Run RECIPE with some of its text replaced; return the folder of the run."""
    recipe = RECIPE
    for old, new in replacements:
        assert old in recipe
        recipe = recipe.replace(old, new)
    (folder / "run.toml").write_text(recipe.format(cache=folder / "cache"))
    assert cli.run(["experts", "train", str(folder / "run.toml"), "--quiet", "--out", str(folder)]) == 0
    return folder / "run"


def edit_manifest(run: Path, beliefs: tuple[float | None, ...] = (), **mixture: object) -> None:
    """Change the mixture's fields, and the beliefs that are not None, in the manifest of an ensemble."""
    manifest = json.loads((run / "experts.json").read_text())
    manifest["mixture"] |= mixture
    for member, belief in zip(manifest["members"], beliefs, strict=False):
        if belief is not None:
            member["belief"] = belief
    (run / "experts.json").write_text(json.dumps(manifest))


def ensembles(run: Path) -> list[ArmResult]:
    """The first seed's arms with several experts."""
    found = results(run)
    return [found.runs[0].arms[arm] for arm in found.ensembles]


def processes(word: str) -> list[int]:
    """Ids of the processes with ``word`` in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if word in command:
                found.append(int(folder.name))
    return found


@contextmanager
def killing(word: str) -> Iterator[list[int]]:
    """Kill every process with ``word`` in its command line while the block runs; yield the list of killed ids."""
    over, killed = threading.Event(), list[int]()

    def hunt() -> None:
        while not over.wait(0.02):
            for pid in processes(word):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                if pid not in killed:
                    killed.append(pid)

    hunter = threading.Thread(target=hunt)
    hunter.start()
    try:
        yield killed
    finally:
        over.set()
        hunter.join()


@pytest.mark.slow
def test_a_run_reports_its_experts_and_a_generalist_of_equal_compute(made: Path) -> None:
    run = made / "runs" / "tiny"
    found = results(run)
    assert found.trained == ["tables", "topics", "code"] and found.untrained == ["asyncio"]
    (seed,) = found.runs
    assert seed.lost == [] and set(seed.difficulty["probe"]) == set(found.trained)
    assert sorted(seed.tier["probe"].values()) == [0, 1, 2]
    assert len({round(arm.flops) for arm in seed.arms.values()}) == 1
    for arm in seed.arms.values():
        for found_score in arm.scores.values():
            assert found_score.loss <= found_score.averaged + 1e-9
            assert sum(found_score.speaking) == pytest.approx(1)
    rival = seed.arms["generalist-M"]
    assert [job.name for job in rival.experts] == ["generalist-M-18"], "three experts of six steps"
    assert found.times("M_Ho-I_Ho", "generalist-M") == pytest.approx(3)
    assert all(one.loss == one.best for one in rival.scores.values())
    assert not any("generalist" in member.name for member in Ensemble(run).manifest.members)
    verdict = (run / "report.html").read_text()
    assert "one model of the same training compute (generalist-M)" in verdict and "3.0" in verdict
    assert (run / "report.html").stat().st_size > 10_000
    assert found.speech is not None and len(found.speech.pieces) == len(found.speech.weights)


@pytest.mark.slow
def test_scores_are_those_of_the_saved_models(made: Path) -> None:
    """Score one test text again with the ensemble of the manifest."""
    run = made / "runs" / "tiny"
    ensemble, best = Ensemble(run), min(ensembles(run), key=lambda arm: arm.held_out)
    assert [member.name for member in ensemble.manifest.members] == [job.name for job in best.experts]
    data = DataConfig(
        source=str(run / "test" / "code.jsonl"), tokenizer=str(run / "tokenizer.json"), validation=0.0,
        cache=str(made / "cache"),
    )  # fmt: skip
    samples = windows(tokenise_corpus(data, 257), "train", 32, 8)
    again = score(ensemble.logps(samples), ensemble.log_prior(samples), ensemble.manifest.mixture)
    assert again.loss == pytest.approx(best.scores["code"].loss, abs=1e-6)


@pytest.mark.slow
def test_a_resumed_run_trains_nothing_twice(copied: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)  # training fails
    monkeypatch.setattr(result_cache, "__version__", "9.9")  # models of another version are used
    before = results(copied)
    (copied / "results.json").unlink()
    recipe = copied / "tiny.toml"
    recipe.write_text((made / "tiny.toml").read_text().replace("retries = 1", "retries = 5\nworkers = 1"))
    assert cli.run(["experts", "train", str(recipe), "--quiet", "--out", str(copied.parent)]) == 0
    assert results(copied) == before


@pytest.mark.slow
def test_another_mixture_scores_the_trained_experts_again(
    copied: Path, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)  # training fails
    before = results(copied)
    recipe = copied / "tiny.toml"
    mixture = '{ prior = "votes", votes.by = "bayes", top_k = 1, prefix = 0 }'
    recipe.write_text((made / "tiny.toml").read_text().replace("{ prefix = 8 }", mixture))
    words = ["experts", "train", str(recipe), "--quiet", "--out", str(copied.parent)]
    assert cli.run(words) == 0
    after = results(copied)
    assert after.runs[0].single == before.runs[0].single and after.mixture is not None
    assert after.mixture.describe() in " ".join(capsys.readouterr().out.split())
    assert after.mixture.describe() in (copied / "report.html").read_text()
    assert after.times("M_Ho-I_Ho", "generalist-M") == pytest.approx(1)
    manifest = Ensemble(copied).manifest
    assert manifest.mixture == after.mixture and all(member.routed is not None for member in manifest.members)
    made_with = copied / "experts-recipe.json"  # older versions store the mixture too
    stored = result_cache.read_result(made_with, experts_command._Inputs)
    stored.experts["mixture"] = {"prior": "uniform"}
    identity = result_cache.identity(stored.model_dump())
    result_cache.CachedResult(made_with, experts_command._Inputs, identity).write(stored)
    assert cli.run(words) == 0


@pytest.mark.slow
def test_an_expert_that_always_dies_does_not_change_the_others(
    copied: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = results(copied).runs[0]
    lost = before.arms["M_Ho-I_Ho"].experts[0].name
    shutil.rmtree(copied / "seed-1" / "experts" / lost)
    with killing(f"{copied}/seed-1/experts/{lost}") as killed:
        assert cli.run(["experts", "train", str(made / "tiny.toml"), "--out", str(copied.parent)]) == 0
    assert len(killed) == 2, "one start and one retry"
    assert "given up after 2 attempts" in capsys.readouterr().out
    after = results(copied).runs[0]
    assert after.lost == [lost]
    assert [job.name for job in after.arms["M_Ho-I_Ho"].experts] == [
        job.name for job in before.arms["M_Ho-I_Ho"].experts[1:]
    ]
    assert all(score.loss < 10 for score in after.arms["M_Ho-I_Ho"].scores.values())
    assert after.single == {name: losses for name, losses in before.single.items() if name != lost}
    for arm, found in before.arms.items():
        if lost not in [job.name for job in found.experts]:
            assert after.arms[arm] == found


@pytest.mark.slow
def test_the_report_handles_an_expert_lost_from_one_arm(made: Path, tmp_path: Path) -> None:
    found = results(made / "runs" / "tiny")
    (run,) = found.runs
    lost, fuller = run.arms["M_Ho-I_He"], run.arms["M_Ho-I_Ho"]
    fewer = {"top-1": lost.fewer["top-1"]}
    short = lost.model_copy(update={"experts": lost.experts[1:], "fewer": fewer, "passes": {"top-1": 1.5}})
    again = run.model_copy(update={"arms": run.arms | {"M_Ho-I_He": short}, "lost": [lost.experts[0].name]})
    for runs in ([again], [run, again]):
        show_results(damaged := found.model_copy(update={"runs": runs}))
        report = write_experts_report(damaged, tmp_path / "report.html").read_text()
        assert "1 expert could not be trained" in report
        assert f"top-2 ({fuller.passes['top-2']:.2f} passes a token)" in report


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_resumes_to_equal_results(tmp_path: Path) -> None:
    """Five trainings with a kill equal the same five without one, to the last bit."""
    small = RECIPE.replace("sizes = {{ S = 16, M = 32, L = 48 }}", "sizes = {{ M = 32 }}")
    small = small.replace("steps = [4, 6, 8]", "steps = [6]").replace(TOPICS, "")
    (tmp_path / "tiny.toml").write_text(small.format(cache=tmp_path / "cache"))
    words = [sys.executable, "-m", "planaria", "experts", "train", str(tmp_path / "tiny.toml"), "--quiet", "--out"]
    with (tmp_path / "log").open("wb") as log:
        command = subprocess.Popen([*words, str(tmp_path / "killed")], stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("killed/tiny/seed-1/seeds/*/model/model.safetensors")):
        assert command.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    command.kill()
    command.wait()
    while processes(f"{tmp_path}/killed"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for out in ("killed", "whole"):
        done = subprocess.run([*words, str(tmp_path / out)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert results(tmp_path / "killed" / "tiny") == results(tmp_path / "whole" / "tiny")


def _rows(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Return the cells of the printed table, without its header."""
    _, _, body = capsys.readouterr().out.rpartition("──")
    return [re.split(r"\s{2,}", line.strip()) for line in body.splitlines() if line.strip()]


@pytest.mark.slow
def test_an_ensemble_is_evaluated_on_a_given_text_or_on_its_test_texts(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "--experts", str(copied)]
    assert cli.run([*words, "--text", str(copied / "test" / "code.jsonl")]) == 0
    together, *single = [next(cell for cell in cells if re.fullmatch(r"\d+\.\d+", cell)) for cells in _rows(capsys)]
    assert len(single) == 3
    assert cli.run(words) == 0
    *lines, mixture = _rows(capsys)
    assert [cells[0] for cells in lines] == ["asyncio", "code", "tables", "topics"]
    assert mixture == ["mixture", "prior = uniform, top_k = 0 (all experts)"]
    _, code, *_ = lines
    assert code[1] == together and code[3] == min(single, key=float)
    shutil.rmtree(copied / "test")
    with pytest.raises(UserError, match="has no test texts; pass --text FILE"):
        cli.run(words)
    (copied / "short.txt").write_text("too short")
    with pytest.raises(UserError, match=r"short\.txt has 10 tokens, but one sample takes .* 33; use a longer"):
        cli.run([*words, "--text", str(copied / "short.txt")])
    with pytest.raises(UserError, match=r"^'.*none\.txt': there is no 'none\.txt'"):
        cli.run([*words, "--text", str(copied / "none.txt")])


@pytest.mark.slow
def test_cached_generation_draws_from_the_mixture(made: Path) -> None:
    """Greedy tokens, also past the end of the context, maximise the mixture recomputed for every token."""
    ensemble = Ensemble(made / "runs" / "tiny", max_models=1)
    whole = ensemble.tokenizer.encode("import os")
    read = ensemble.logps(torch.tensor(whole)[None])[:, 0].sum(-1)
    log_w = (ensemble.log_prior_after(whole) + read).log_softmax(0)
    for drawn in list(ensemble.generate(whole, 30)):
        log_p = next_log_p(ensemble, whole)
        check_likeliest(drawn, log_p, log_w)
        log_w = (log_w + log_p[:, drawn]).log_softmax(0)
        whole.append(drawn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("top_k", "prefix", "prompt"),
    [(1, 8, "import os, sys"), (2, 8, "import os"), (1, 20, "im"), (2, 9, "i"), (1, 0, "import")],
)
def test_generation_and_evaluation_select_the_same_experts(copied: Path, top_k: int, prefix: int, prompt: str) -> None:
    edit_manifest(copied, (0.3, 0.1, 0.2), top_k=top_k, prefix=prefix)
    check_generation(Ensemble(copied), prompt, 14)


@pytest.mark.slow
def test_generation_by_the_prior_alone_loads_only_the_selected_experts(copied: Path) -> None:
    edit_manifest(copied, (None, None, 1.0), top_k=1, prefix=0)
    ensemble = Ensemble(copied)
    tokens = ensemble.tokenizer.encode("import os")
    found = list(ensemble.generate(tokens, 10))
    assert list(ensemble._models) == [ensemble.manifest.members[2].name]
    assert found == list(generate(ensemble.model(2), tokens, 10, stops=(ensemble.tokenizer.end,)))


@pytest.mark.slow
def test_weights_for_the_worst_domain_equal_those_of_the_report(
    made: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command changes no file."""
    before = {file: file.read_bytes() for file in copied.rglob("*") if file.is_file()}
    assert cli.run(["eval", "--experts", str(copied), "--worst"]) == 0
    printed = capsys.readouterr().out
    assert {file: file.read_bytes() for file in copied.rglob("*") if file.is_file()} == before
    found = results(copied).worst
    assert found is not None and found.tokens == 8 and set(found.prices) == {"tables", "topics", "code"}
    assert 0 <= found.gap < 1e-3 and sum(found.weights) == pytest.approx(1)
    assert "Worst of 3 domains on" in printed and "a better expert for this domain" in printed
    assert "The worst domain" in (copied / "report.html").read_text()
    assert cli.run(["eval", "--experts", str(copied), "--worst", "--tokens", "3", "--tolerance", "1e-9"]) == 0
    assert "first 3 tokens" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--tokens", "3"], "--tokens 3 requires --worst"),
        (["--worst", "--text", "x"], "--text x cannot be combined with --worst"),
        (["--worst", "--tokens", "33"], "--tokens 33: texts have 32 tokens here"),
        (["--worst", "--floor", "0.34"], "--floor 0.34 must be above 0 and below 1/3"),
        (["--worst", "--tolerance", "0"], "--tolerance 0 must be above 0"),
        (["--omit", "0.5"], "--omit 0.5 applies to runs"),
    ],
)
def test_invalid_options_of_weigh_are_refused(flags: list[str], complaint: str, made: Path) -> None:
    with pytest.raises(UserError, match=complaint):
        cli.run(["eval", "--experts", str(made / "runs" / "tiny"), *flags])


@pytest.mark.slow
def test_weigh_needs_texts_and_several_experts(copied: Path) -> None:
    (copied / "held-out" / "code.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match=r"domain 'code' .*code\.jsonl"):
        cli.run(["eval", "--experts", str(copied), "--worst"])
    shutil.rmtree(copied / "held-out")
    with pytest.raises(UserError, match="has no texts of domains"):
        cli.run(["eval", "--experts", str(copied), "--worst"])
    for member in Ensemble(copied).manifest.members[1:]:
        assert cli.run(["experts", "edit", str(copied), "--remove", member.name]) == 0
    with pytest.raises(UserError, match="has only one expert"):
        cli.run(["eval", "--experts", str(copied), "--worst"])


@pytest.mark.slow
def test_experts_are_added_and_removed(copied: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [member.name for member in Ensemble(copied).manifest.members]
    with pytest.raises(UserError, match="unknown expert 'tabels'; did you mean 'tables-"):
        cli.run(["experts", "edit", str(copied), "--remove", "tabels"])
    assert cli.run(["experts", "edit", str(copied), "--remove", "tables"]) == 0, "by its domain"
    assert [member.name for member in Ensemble(copied).manifest.members] == names[1:]
    again = copied / "seed-1" / "experts" / names[0]
    assert cli.run(["experts", "edit", str(copied), "--add", str(again), "--as", "back", "--domain", "tables"]) == 0
    found = Ensemble(copied)
    assert [member.name for member in found.manifest.members] == [*names[1:], "back"]
    samples = torch.randint(0, 256, (2, 33))
    assert torch.equal(found.logps(samples)[-1], Ensemble(made / "runs" / "tiny").logps(samples)[0])
    for name, complaint in (("back", "already"), ("a/b", "not a valid name")):
        with pytest.raises(UserError, match=complaint):
            commands.add_expert(copied, again, name, "")
    assert cli.run(["experts", "edit", str(copied), "--remove", "back"]) == 0
    assert cli.run(["experts", "edit", str(copied), "--add", str(again), "--as", "back", "--domain", "[/law]"]) == 0
    assert Ensemble(copied).manifest.member("back").model == "added/back-2"
    assert sorted(path.name for path in (copied / "added").iterdir()) == ["back", "back-2"]
    assert cli.run(["eval", "--experts", str(copied), "--text", str(copied / "test" / "code.jsonl")]) == 0
    assert "[/law]" in capsys.readouterr().out
    words = ["experts", "train", str(made / "tiny.toml"), "--quiet", "--out", str(copied.parent)]
    assert cli.run(words) == 0, "resuming the run keeps changes by hand"
    assert [member.name for member in Ensemble(copied).manifest.members] == [*names[1:], "back"]
    for name in names[1:]:
        cli.run(["experts", "edit", str(copied), "--remove", name])
    with pytest.raises(UserError, match="only expert"):
        cli.run(["experts", "edit", str(copied), "--remove", "back"])
    with pytest.raises(UserError, match="unknown expert 'bakc'; did you mean 'back'"):
        cli.run(["experts", "edit", str(copied), "--remove", "bakc"])


@pytest.mark.slow
def test_a_damaged_file_is_named(copied: Path) -> None:
    manifest = copied / "experts.json"
    kept = json.loads(manifest.read_text())
    weights = copied / kept["members"][0]["model"] / "model.safetensors"
    words = ["generate", "--experts", str(copied), "--prompt", "x"]

    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"\1")
    with pytest.raises(UserError, match=r"expert '.*': .* is not the file that was added"):
        cli.run(words)
    weights.unlink()
    with pytest.raises(UserError, match=r"expert '.*': .* is missing; restore it, or `planaria experts edit"):
        cli.run(words)
    weights.write_bytes(whole)

    manifest.write_text(json.dumps(kept | {"vocab": 300}))
    with pytest.raises(UserError, match="has a vocabulary of 257 ids, the ensemble of 300"):
        cli.run(words)
    manifest.write_text(json.dumps(kept | {"vocab": "many"}))
    with pytest.raises(UserError, match=r"experts\.json: vocab: input should be a valid integer"):
        cli.run(words)
    manifest.write_text("{")
    with pytest.raises(UserError, match="Invalid JSON"):
        cli.run(words)
    manifest.write_text(json.dumps(kept | {"members": []}))
    with pytest.raises(UserError, match="has no experts"):
        cli.run(words)
    manifest.unlink()
    with pytest.raises(UserError, match="holds no ensemble"):
        cli.run(words)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("[experts.domains]", "[experts.domain]", "experts.domain: unknown key; did you mean 'domains'"),
        ("steps = [4, 6, 8]", "steps = [4, 6]", "use equally many, an odd number"),
        ("steps = [4, 6, 8]", "steps = [4, 6, 20]", "more compute"),
        ("cp*.py", "nothing*.py", "no file matches"),
        ("probe = {{ steps = 8 }}", 'probe = {{ steps = 8, by = ["hand"] }}', "domains.tables.hand is missing"),
        ('engine = "inline"', 'engine = "simulate"', "a simulation trains no models"),
        ("[experts]", '[chaos]\ntrace = "nowhere.json"\n\n[experts]', "nowhere.json cannot be read"),
        ("asyncio =", "code =", "is also in experts.domains"),
        ("vocab = 257", "vocab = 100", "model.vocab"),
        ("max_chars = 60000", "max_chars = 20000", "are too few to learn from"),
        (""", begins = "^ *'[^' ]+': \"""", "", r"topics: none of its 1 documents .*topics\.begins"),
        ("test_windows = 8", "test_windows = 8\nschedule_steps = 9", "optim.schedule = 'constant' has no end"),
        ("test_windows = 8", 'test_windows = 8\ngeneralists = ["XL"]', "there is no size 'XL'"),
        ("prefix = 8", "top_k = 4", r"bad.toml: experts\.mixture\.top_k = 4 is more than the 3 experts"),
        ("prefix = 8", "top_k = 1", r"mixture\.prefix = 32: a text has model\.context = 32 tokens, so top_k = 1"),
        ("prefix = 8", "votes = {{ keep = 4 }}", r"bad\.toml: experts\.mixture\.votes: prior = 'uniform' has no votes"),
        ("prefix = 8", 'prior = "vote"', r"mixture\.prior = 'vote': .*; did you mean 'votes'\?"),
    ],
)
def test_bad_recipes_are_refused_before_anything_is_trained(
    old: str, new: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert old in RECIPE
    (tmp_path / "bad.toml").write_text(RECIPE.replace(old, new).format(cache=tmp_path / "cache"))
    with pytest.raises(UserError, match=complaint):
        cli.run(["experts", "train", str(tmp_path / "bad.toml"), "--quiet", "--out", str(tmp_path / "runs")])
    assert not (tmp_path / "runs" / "bad").exists()


@pytest.mark.slow
def test_a_dry_run_prints_the_whole_recipe(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["experts", "train", str(made / "tiny.toml"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "tiny.toml").write_text(printed)
    assert cli.run(["experts", "train", str(tmp_path / "tiny.toml"), "--dry-run"]) == 0
    assert capsys.readouterr().out == printed
    assert "sizes" in printed and "[experts.domains.topics]" in printed
    assert "# 1 seed of 14 models: parents, probes, experts and generalists\n# S: 2 models of 5,952 " in printed


@pytest.mark.slow
def test_one_corpus_is_clustered_and_the_clusters_weigh_the_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(
        tmp_path,
        ("tables = {{ source", "stdlib = {{ source"), ("encodings/cp*.py", "*.py"),
        ("max_chars = 60000", "max_chars = 600000"),
        (f'{TOPICS}\ncode = {{{{ source = "stdlib:*.py" }}}}\n', ""),
        ("probe = {{ steps = 8 }}", 'probe = {{ by = ["sizes"] }}'),
        ("mixture = {{ prefix = 8 }}", 'clusters = 3\nmixture = {{ prior = "clusters", prefix = 8, top_k = 1 }}'),
    )  # fmt: skip
    found = results(run)
    assert found.trained == ["stdlib-0", "stdlib-1", "stdlib-2"] and found.untrained == ["asyncio"]
    small, large = (load_file(run / "seed-1" / "seeds" / s / "readings.safetensors") for s in "SL")
    ahead = {name: float((large[f"held_out.{name}"] - small[f"held_out.{name}"]).mean()) for name in found.trained}
    assert found.runs[0].difficulty["sizes"] == pytest.approx(ahead, abs=1e-6)
    ensemble = Ensemble(run)
    samples = torch.randint(97, 122, (2, 33))
    before = ensemble.weights(samples)
    samples[:, 20:] = 32
    assert torch.equal(ensemble.weights(samples)[..., :20], before[..., :20]), "weights depend on later text"
    check_generation(ensemble, "def f(", 20)
    capsys.readouterr()
    assert cli.run(["generate", "--experts", str(run), "--prompt", "import ", "--tokens", "5"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("import ") and len(printed.removeprefix("import ").removesuffix("\n")) > 0
    (run / "embedding.safetensors").unlink()
    with pytest.raises(UserError, match=r"embedding\.safetensors: missing or damaged"):
        Ensemble(run)


@pytest.mark.slow
def test_a_copied_folder_trains_the_same_experts_at_another_path(made: Path, tmp_path: Path) -> None:
    """The recipes of an expert and of the generalist need nothing from the original folder."""
    there = shutil.copytree(made / "runs" / "tiny", tmp_path / "elsewhere" / "tiny")
    shelf = there / "seed-1" / "experts"
    for name in ("code-M-6", "generalist-M-18"):
        assert str(made) not in (shelf / f"{name}.toml").read_text()
        before = load_file(shelf / name / "model" / "model.safetensors")
        shutil.rmtree(shelf / name)
        assert cli.run(["train", str(shelf / f"{name}.toml"), "--quiet", "--out", str(shelf)]) == 0
        after = load_file(shelf / name / "model" / "model.safetensors")
        assert all(torch.equal(after[key], value) for key, value in before.items())
        assert str(made) not in (shelf / name / "config.json").read_text()


@pytest.mark.slow
def test_chains_of_experts_from_two_parents(tmp_path: Path) -> None:
    """HDEE's options: two parents, a domain after another, part of a longer schedule, a domain of mixed text."""
    run = trained(
        tmp_path,
        ("sizes = {{ S = 16, M = 32, L = 48 }}", "sizes = {{ M = 32 }}\nparents = 2\nschedule_steps = 12"),
        ("steps = [4, 6, 8]", "steps = [6]"),
        ("seed = {{ steps = 10 }}", 'seed = {{ steps = 10, text = {{ source = "stdlib:json/*.py" }} }}'),
        ("probe = {{ steps = 8 }}", 'probe = {{ by = ["seed_loss"] }}'),
        ("mixture = {{ prefix = 8 }}", 'mixture = {{ prior = "ridge" }}'),
        ("train = {{", 'optim = {{ schedule = "cosine", warmup = 2 }}\ntrain = {{'),
        ("code = {{ source", 'mix = {{ of = ["tables", "topics"] }}\ncode = {{ after = "topics", source'),
    )
    found = results(run)
    assert [(one.seed, one.line) for one in found.runs] == [(1, 0), (1, 1)]
    assert sorted(one.parents["M"] for one in found.runs) == ["M", "M.2"]
    for one in found.runs:
        assert [job.domain for job in one.arms["M_Ho-I_Ho"].experts] == ["tables", "mix", "code"], (
            "topics is only an intermediate step"
        )
        assert [job.steps for job in one.arms["generalist-M"].experts] == [24], "the compute of four experts"
    assert len(set(found.luck("generalist-M"))) == 2
    for one in found.runs:
        beside = load_file(run / "seed-1" / "seeds" / one.parents["M"] / "ridge.safetensors")
        assert sorted(beside) == ["code", "mix", "tables"], "each parent weighs the experts of its line"
    ensemble = Ensemble(run)
    assert ensemble.manifest.parent == f"seed-1/seeds/{found.runs[0].parents['M']}/model"
    samples = domain_samples(run, ["tables", "topics"], "test", 257, 32, 8)
    again = score(ensemble.logps(samples), ensemble.log_prior(samples), ensemble.manifest.mixture)
    assert again.loss == pytest.approx(found.runs[0].arms["M_Ho-I_Ho"].scores["mix"].loss, abs=1e-6)
    assert cli.run(["experts", "edit", str(run), "--merge", "dume", "--to", str(tmp_path / "merged")]) == 0
    members = {member.domain: member for member in ensemble.manifest.members}
    assert members["code"].parent == "seed-1/experts/topics-M-6/model"
    recipes = {file.stem: tomllib.loads(file.read_text()) for file in (run / "seed-1" / "experts").glob("*.toml")}
    assert recipes["code-M-6.2"]["train"]["start"] == "./topics-M-6.2/model"
    assert recipes["code-M-6"]["train"]["schedule_steps"] == 12
    assert recipes["generalist-M-24"]["train"]["schedule_steps"] == 48
    assert sorted(recipes["mix-M-6"]["data"]["mixture"]) == ["tables", "topics"]
    assert recipes["mix-M-6"]["train"]["start"].startswith("../seeds/M")
    parent = tomllib.loads((run / "seed-1" / "seeds" / "M.2.toml").read_text())
    assert parent["data"]["source"] == "../../general" and parent["train"]["schedule_steps"] == 0


@pytest.mark.slow
def test_experts_weighed_by_their_parent_merge_into_one_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(
        tmp_path,
        ("sizes = {{ S = 16, M = 32, L = 48 }}", "sizes = {{ M = 32 }}"), ("steps = [4, 6, 8]", "steps = [30]"),
        ("mixture = {{ prefix = 8 }}", 'mixture = {{ prior = "ridge", prefix = 0, top_k = 1 }}'),
        (TOPICS, ""),
    )  # fmt: skip
    (seed,) = results(run).runs
    ensemble, arm = Ensemble(run), seed.arms["M_Ho-I_Ho"]
    data = DataConfig(source=str(run / "test" / "code.jsonl"), tokenizer=str(run / "tokenizer.json"), validation=0.0)
    samples = windows(tokenise_corpus(data, 257), "train", 32, 8)
    again = score(ensemble.logps(samples), ensemble.log_prior(samples), ensemble.manifest.mixture)
    assert again.loss == pytest.approx(arm.scores["code"].loss, abs=1e-6)
    assert list(ensemble.generate(ensemble.tokenizer.encode("import os"), 5)) and len(ensemble._models) == 1
    assert cli.run(["experts", "edit", str(run), "--merge", "dume", "--to", str(tmp_path / "merged")]) == 0
    capsys.readouterr()
    assert cli.run(["eval", str(tmp_path / "merged")]) == 0
    assert [row[0] for row in _rows(capsys)] == ["asyncio", "code", "tables"]


@pytest.mark.slow
def test_a_run_is_not_resumed_with_another_recipe(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "tiny.toml"
    other.write_text((made / "tiny.toml").read_text().replace("steps = 10", "steps = 12"))
    with pytest.raises(UserError, match=r"was made with a different recipe \(experts\.seed\.steps\)"):
        cli.run(["experts", "train", str(other), "--out", str(made / "runs")])
