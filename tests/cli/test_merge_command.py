"""``planaria experts edit --merge``: the merged model, commands that read it, and refusals before any computation."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from planaria import cli
from planaria.common.errors import UserError
from planaria.lab.experts import manifest
from planaria.models.fused import Fused
from planaria.models.huggingface import export_model, import_model
from planaria.models.llama_stages import Llama
from planaria.runtime.preparation.weight_sources import open_model
from support.untrained_ensemble import SHAPE, child, text, write_ensemble

THREE = ("digits", "lower", "upper")
TOKENS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an ensemble of two, ``ensemble``, and its merged model, ``merged``."""
    folder = tmp_path_factory.mktemp("merging")
    write_ensemble(folder)
    merge(folder / "ensemble", folder / "merged")
    return folder


def merge(run: Path, to: Path, *words: object, how: str = "dume") -> None:
    assert cli.run(["experts", "edit", str(run), "--merge", how, "--to", str(to), *map(str, words)]) == 0


def edit(run: Path, to: Path, *words: object) -> None:
    assert cli.run(["experts", "edit", str(run), "--to", str(to), *map(str, words)]) == 0


def logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return import_model(folder)(TOKENS)


def rows(printed: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in printed.rpartition("──")[2].splitlines() if line.strip()]


def test_a_merged_model_is_evaluated_and_generates(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merged = str(made / "merged")
    assert cli.run(["eval", merged]) == 0
    digits, lower = rows(capsys.readouterr().out)
    for row, domain in ((digits, "digits"), (lower, "lower")):
        assert row[0] == domain and row[2] == f"{domain}-expert" and float(row[3].rstrip("%")) > 90
    assert cli.run(["eval", merged, "--text", str(made / "ensemble" / "test" / "digits.jsonl")]) == 0
    assert rows(capsys.readouterr().out)[0][1] == digits[1]
    words = ["generate", merged, "--prompt", "123", "--tokens", "10", "--seed", "1"]
    assert cli.run(words) == 0
    first = capsys.readouterr().out
    assert first.startswith("123") and cli.run(words) == 0 and capsys.readouterr().out == first


def test_averaging_takes_the_mean_of_the_weights(made: Path, tmp_path: Path) -> None:
    merge(made / "ensemble", tmp_path / "mean", how="average")
    found = import_model(tmp_path / "mean").global_state()
    experts = [import_model(made / "ensemble" / f"{name}/model").global_state() for name in ("digits", "lower")]
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, (experts[0][name] + experts[1][name]) / 2)


@pytest.mark.parametrize("how", ["average", "sum", "ties", "dare"])
def test_dense_merges_are_evaluated_on_the_experts_test_texts(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    merge(made / "ensemble", tmp_path / "merged", how=how)
    capsys.readouterr()
    assert cli.run(["eval", str(tmp_path / "merged")]) == 0
    assert [len(row) for row in rows(capsys.readouterr().out)] == [2, 2]


def test_transformers_read_an_export_without_router_bias(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.router\.bias .*--no-bias"):
        cli.run(["export", str(made / "merged"), "--to", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    merge(made / "ensemble", tmp_path / "plain", "--no-bias", "--top-k", 2, "--temperature", "0.3")
    assert cli.run(["export", str(tmp_path / "plain"), "--to", str(tmp_path / "out")]) == 0
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == "MixtralForCausalLM"
    with torch.no_grad():
        assert float((theirs(TOKENS).logits - logits(tmp_path / "plain")).abs().max()) <= 1e-4


def test_experts_are_added_to_and_removed_from_a_merged_model(made: Path, tmp_path: Path) -> None:
    run = write_ensemble(tmp_path, names=THREE)
    (source := tmp_path / "upper.txt").write_text(text("upper"))
    words = ["--add", run / "upper" / "model", "--as", "third", "--domain", "upper", "--text", source]
    edit(made / "merged", tmp_path / "more", *words)
    record = Fused.model_validate_json((tmp_path / "more" / "fused.json").read_text())
    assert [part.name for part in record.parts] == ["digits-expert", "lower-expert", "third"]
    kept, sums = (
        load_file(made / "merged" / "routers.safetensors"),
        load_file(tmp_path / "more" / "routers.safetensors"),
    )
    assert all(torch.equal(kept[name], sums[name]) for name in kept) and set(sums) == {*kept, "third"}
    edit(tmp_path / "more", tmp_path / "fewer", "--remove", "third")
    assert torch.equal(logits(tmp_path / "fewer"), logits(made / "merged")), (
        "adding and removing an expert restores the model"
    )
    edit(tmp_path / "more", tmp_path / "other", "--remove", "digits-expert")
    assert import_model(tmp_path / "other").routing == (2, 1, True)
    edit(tmp_path / "other", tmp_path / "one", "--remove", "third")
    for folder, name, complaint in (
        ("one", "lower-expert", "is its only expert"),
        ("more", "thrid", "did you mean 'third'"),
    ):
        with pytest.raises(UserError, match=complaint):
            edit(tmp_path / folder, tmp_path / "none", "--remove", name)


def test_an_ensemble_is_edited_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_ensemble(tmp_path, names=THREE)
    names = [member.name for member in manifest.read(run).members]
    model = Path(shutil.copytree(run / "upper" / "model", tmp_path / "model"))
    assert cli.run(["experts", "edit", str(run), "--remove", names[0]]) == 0
    assert cli.run(["experts", "edit", str(run), "--add", str(model), "--as", "back", "--domain", "upper"]) == 0
    assert [member.name for member in manifest.read(run).members] == [*names[1:], "back"]
    assert cli.run(["eval", "--experts", str(run), "--worst", "--tokens", "4"]) == 0
    assert "Worst of 3 domains on" in capsys.readouterr().out


def test_experts_that_cannot_be_merged_are_refused(made: Path, tmp_path: Path) -> None:
    def refused(complaint: str, *words: object) -> None:
        with pytest.raises(UserError, match=complaint) as caught:
            merge(run, tmp_path / "out", *words)
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()

    run = write_ensemble(tmp_path)
    known = manifest.read(run)
    first, second = known.members

    def changed(**changes: object) -> None:
        manifest.write(run, known.model_copy(update={"members": [first, second.model_copy(update=changes)]}))

    def replaced(model: Llama, **changes: object) -> None:
        shutil.rmtree(run / "lower" / "model")
        export_model(model, run / "lower" / "model", run / manifest.TOKENIZER, 256)
        changed(sha256=manifest.digest(run / "lower" / "model" / manifest.WEIGHTS), **changes)

    changed(parameters=5)
    refused("experts of unequal size")
    changed(parent="other/model")
    refused("parent of its experts is unknown; pass --safe MODEL")
    changed(domain="law")
    refused(r"expert 'lower-expert': its domain 'law' has no text, .*domains/law\.jsonl")
    (run / "domains" / "law.jsonl").write_text('{"text": "short"}\n')
    refused(r"domain 'law' \(.*law\.jsonl\)")
    replaced(Llama(SHAPE, seed=9))
    refused("expert 'lower-expert': its weights are .* that is not its parent")
    replaced(Llama(SHAPE.model_copy(update={"hidden": 40}), seed=1))
    refused("expert 'lower-expert': .*has shape")
    replaced(Llama(SHAPE.model_copy(update={"vocab": 300}), seed=1))
    refused("expert 'lower-expert': .*embed_tokens.* has shape")
    replaced(child(Llama(SHAPE, seed=1), 1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        merge(run, tmp_path / "full")
    merge(run, tmp_path / "out")


def test_too_little_text_needs_a_lambda(tmp_path: Path) -> None:
    run = write_ensemble(tmp_path)
    shape = SHAPE.model_copy(update={"dim": 80, "heads": 2})
    parent = Llama(shape, seed=1)
    known = manifest.read(run)
    members = []
    for name, model in (("parent", parent), ("digits", child(parent, 1)), ("lower", child(parent, 2))):
        shutil.rmtree(run / name / "model")
        export_model(model, run / name / "model", run / manifest.TOKENIZER, 256)
    for member in known.members:
        sha256 = manifest.digest(run / member.model / manifest.WEIGHTS)
        members.append(member.model_copy(update={"sha256": sha256}))
    manifest.write(run, known.model_copy(update={"members": members}))
    with pytest.raises(UserError, match=r"λ = 0: 64 tokens for 81 numbers of a router leave more than one solution"):
        merge(run, tmp_path / "out", "--lambda", 0, "--samples", 1)
    assert not (tmp_path / "out").exists()
    merge(run, tmp_path / "out", "--samples", 1)


@pytest.mark.parametrize(
    ("how", "words", "complaint"),
    [
        ("dume", ["--top-k", "-1"], r"--top-k -1 must be 0 \(all\) or more"),
        ("dume", ["--temperature", "0"], "--temperature 0 must be 1e-06 or more"),
        ("dume", ["--lambda", "-1"], "--lambda -1 must be 0 or more"),
        ("dume", ["--samples", "0"], "--samples 0 must be 1 or more"),
        ("average", ["--top-k", "1"], "--top-k 1 is about routers"),
        ("average", ["--lambda", "1"], "--lambda 1.0 does not apply to an average"),
        ("dume", ["--seed", "1"], "--seed 1 is for --merge dare"),
    ],
)
def test_invalid_options_are_refused(how: str, words: list[str], complaint: str, made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=complaint):
        merge(made / "ensemble", tmp_path / "out", *words, how=how)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("RUN", "pass --add MODEL, --remove NAME or --merge HOW"),
        ("RUN --text x", "--text x requires --add"),
        ("RUN --as x", "--as x requires --add"),
        ("RUN --add x --remove y", "--add and --remove: pass one"),
        ("RUN --remove x --to y", "--to y is for a merged model"),
        ("RUN --add x --merge sum --to y", "--add and --merge: pass one"),
        ("RUN --remove x --lambda 1", "--lambda 1.0 requires --merge HOW"),
        ("RUN --merge sum", "--merge sum: pass --to FOLDER"),
        ("MERGED --merge sum --to y", "is already one model; --merge is for an ensemble"),
        ("MERGED --remove x", "is a merged model, which is not changed in place; pass --to FOLDER"),
        ("MERGED --add x --to y", "--add x: no text"),
        ("RUN/digits/model --remove x --to y", "is not a model of `planaria experts edit --merge dume`"),
    ],
)
def test_an_invalid_edit_is_refused(words: str, complaint: str, made: Path) -> None:
    words = words.replace("RUN", str(made / "ensemble")).replace("MERGED", str(made / "merged"))
    with pytest.raises(UserError, match=complaint):
        cli.run(["experts", "edit", *words.split()])


def test_an_invalid_addition_is_refused(made: Path, tmp_path: Path) -> None:
    merged, expert, source = made / "merged", made / "ensemble" / "lower" / "model", tmp_path / "text.txt"
    source.write_text(text("upper"))

    def refused(
        complaint: str, model: Path, folder: Path = merged, words: tuple[object, ...] = ("--text", source)
    ) -> None:
        with pytest.raises(UserError, match=complaint):
            edit(folder, tmp_path / "out", "--add", model, *words)
        assert not (tmp_path / "out").exists()

    refused("already has an expert 'lower-expert'", expert, words=("--as", "lower-expert", "--text", source))
    refused("there is no such folder", tmp_path / "nowhere")
    export_model(Llama(SHAPE, seed=9), tmp_path / "stranger", made / "ensemble" / manifest.TOKENIZER, 256)
    refused("that is not its parent", tmp_path / "stranger")
    refused("is not a LLaMA like planaria's|transformers cannot read it", merged)
    (tmp_path / "short.txt").write_text("abc")
    refused("short|few|sample", expert, words=("--text", tmp_path / "short.txt"))
    moved = Path(shutil.copytree(merged, tmp_path / "moved"))
    (moved / "routers.safetensors").write_bytes(b"rubbish")
    refused("has changed since it was written", expert, moved)
    assert cli.run(["run", "check", str(moved), "--accept"]) == 0
    refused(r"routers\.safetensors: missing or damaged", expert, moved)
    for sums, complaint in (
        ({"digits-expert": torch.zeros(2, 2)}, "digits-expert: not 2 × 17 × 17 finite numbers in fp64"),
        ({"digits-expert": torch.full((2, 17, 17), torch.nan).double()}, "digits-expert: not 2 × 17 × 17 finite"),
        ({"lower-expert": torch.ones(2, 17, 17).double()}, "has no sums of expert 'digits-expert'"),
    ):
        save_file(sums, moved / "routers.safetensors")
        assert cli.run(["run", "check", str(moved), "--accept"]) == 0
        refused(complaint, expert, moved)


@pytest.mark.slow
def test_commands_for_plain_models_refuse_a_merged_one(made: Path, tmp_path: Path) -> None:
    merged = str(made / "merged")
    with pytest.raises(UserError, match="several blocks per layer, which repair does not support"):
        cli.run(["swarm", "realign", merged, "--pairs", "x.jsonl", "--to", str(tmp_path / "out")])
    with pytest.raises(UserError, match=r"train\.start = .*: 2 feed-forward blocks in each layer"):
        cli.run(["train", "demo", "--train.start", merged, "--dry-run", "--out", str(tmp_path)])
    with pytest.raises(UserError, match="is not a swarm's run"):
        cli.run(["export", merged, "--peer", "p0", "--to", str(tmp_path / "out")])
    with pytest.raises(UserError, match="has no test texts; pass"):
        cli.run(["eval", str(made / "ensemble" / "digits" / "model")])
    record = json.loads((made / "merged" / "fused.json").read_text())
    assert record["by"] == "dume" and record["run"] == str(made / "ensemble")
    model, tokenizer = open_model(made / "merged")
    assert model.routing is not None and tokenizer.vocab == 257
