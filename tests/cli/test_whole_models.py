"""``planaria generate``, ``serve``, ``eval`` and ``checkpoint convert --from`` with models of ``transformers``."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from planaria import cli
from planaria.common import digests
from planaria.common.errors import UserError
from planaria.config.schema import DataConfig
from planaria.control.log.reader import read_run
from planaria.data.shards import tokenise_corpus
from planaria.lab.experts.log_probabilities import windows
from planaria.models.sampling import Sampling
from planaria.models.transformers import adapters
from planaria.models.transformers.decoder import assemble
from planaria.models.transformers.generation import generate
from planaria.models.transformers.recipe_section import decoder_of
from planaria.runtime.api.completer import Completer, complete
from planaria.runtime.checkpoint.loading import weights_of
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.preparation.weight_sources import open_weights
from support.command_line import refused
from support.decoder_folders import given, train

transformers = pytest.importorskip("transformers")
LORA = ("--model.lora.rank", "4")
OWN = ("--model.family", "llama")
STILL = ("--train.steps", "1", "--train.eval_every", "0")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def served(source: str) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """Start ``planaria serve`` for a model named tiny; yield a function that posts a request."""
    words = [sys.executable, "-m", "planaria", "serve", source, "--model-name", "tiny"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url, token = (process.stdout.readline().split()[-1] for _ in range(2))

        def request(body: dict[str, Any]) -> Any:
            headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
            request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)

        yield request
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def windows_of(text: str, context: int) -> torch.Tensor:
    """Return the samples of a text [N, context + 1] for the model in the folder ``given``."""
    data = DataConfig(source=text, tokenizer="given/tokenizer.json", validation=0.0)
    return windows(tokenise_corpus(data, 300), "train", context, 500)


def smollm2(folder: Path) -> Any:
    """Put a small model of SmolLM2's shape, with large random weights, into ``folder``/given."""
    given(folder, "llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=72, intermediate_size=192, num_hidden_layers=6, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=40, tie_word_embeddings=True, rms_norm_eps=1e-5,
        initializer_range=0.2, rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "given")
    return model.eval()


@pytest.mark.parametrize("draws", [Sampling(60), Sampling(60, 1.0, None, 4), Sampling(60, 0.7, 5, 5)])
def test_both_families_complete_a_text_alike(home: Path, draws: Sampling) -> None:
    """Within the context of 40 tokens and beyond it, until a stop token."""
    smollm2(home)
    ours = list(Completer("given").generate([3, 4, 5], draws))
    weights = open_weights("given", "transformers")
    library = assemble(decoder_of(weights.config), weights.tensor)
    assert list(generate(library, [3, 4, 5], 40, draws)) == ours and len(ours) == 60
    stopped = list(generate(library, [3, 4, 5], 40, draws, stops=(ours[7], ours[50])))
    assert stopped == ours[: min(ours.index(ours[7]), ours.index(ours[50]))]
    taken = generate(library, [3, 4, 5], 40, draws)
    assert [next(taken), next(taken)] == ours[:2]
    taken.close()


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "qwen3_moe", "mamba"])
def test_a_run_its_export_and_the_library_complete_alike(home: Path, kind: str) -> None:
    given(home, kind)
    assert train(home, "run", 1e-2, *STILL, "--prompt", "the") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained("runs/run/model").eval()
    tokens = torch.tensor([[3, 4, 5, 6]])
    expected = theirs.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 4:].tolist()
    for source in ("runs/run", "runs/run/model"):
        assert list(Completer(source).generate([3, 4, 5, 6], Sampling(12))) == expected
    assert complete(Path("runs/run"), "the", 100, seed=1).startswith("the")  # past 64 positions


def test_adapters_complete_as_in_peft(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peft = pytest.importorskip("peft")
    base = given(home, "qwen3").eval()
    assert train(home, "lora", 0.1, *LORA) == 0
    tokens = torch.tensor([[3, 4, 5, 6]])
    plain = base.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None)
    theirs = peft.PeftModel.from_pretrained(base, "runs/lora/model").eval()
    adapted = theirs.generate(input_ids=tokens, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert not torch.equal(adapted, plain)
    for source in ("runs/lora", "runs/lora/model"):
        assert list(Completer(source).generate([3, 4, 5, 6], Sampling(12))) == adapted[0, 4:].tolist()
    weights = load_file("given/model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, "given/model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    for source in ("runs/lora", "runs/lora/model"):
        adapters._files.cache_clear()  # a command is a separate process
        assert "base model has changed" in refused(capsys, "generate", source, "--prompt", "a")
    shutil.rmtree("given")
    assert "not on this machine" in refused(capsys, "generate", "runs/lora", "--prompt", "a")
    Path("runs/lora/model", digests.FILE).unlink()
    assert "not exported here" in refused(capsys, "generate", "runs/lora/model", "--prompt", "a")


def perplexity_in(table: str) -> float:
    """Return the only figure with decimals of a printed table."""
    (figure,) = re.findall(r"\d+\.\d+", table)
    return float(figure)


def perplexity_of(model: Any, base: Any, text: str) -> float:
    """Return the perplexity of ``model`` on a text; ``base`` has its context."""
    tokens = windows_of(text, base.config.max_position_embeddings)
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits
    return math.exp(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item())


@pytest.mark.parametrize("source", ["runs/lora", "runs/lora/model"])
def test_adapters_are_served_and_evaluated(home: Path, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A real server, whose greedy completion and its log-probabilities are those of peft."""
    peft = pytest.importorskip("peft")
    base = given(home, "llama").eval()
    assert train(home, "lora", 0.1, *LORA) == 0
    whole = peft.PeftModel.from_pretrained(base, "runs/lora/model").eval()
    if source == "runs/lora/model":
        capsys.readouterr()
        assert cli.run(["eval", source, "--text", "text.txt"]) == 0
        assert perplexity_in(capsys.readouterr().out) == pytest.approx(perplexity_of(whole, base, "text.txt"), rel=1e-4)
    body = {
        "model": "tiny",
        "prompt": [3, 4, 5, 6],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
    }
    with served(source) as request:
        (choice,) = request(body)["choices"]
    new = choice["token_ids"]
    with torch.no_grad():
        logps = whole(input_ids=torch.tensor([[3, 4, 5, 6, *new]])).logits[0, 3:-1].log_softmax(-1)
    assert len(new) == 12 and new == logps.argmax(-1).tolist()
    expected = logps.gather(1, torch.tensor(new)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), expected, rtol=0, atol=1e-4)
    shutil.rmtree("given")
    adapters._files.cache_clear()  # a command is a separate process
    capsys.readouterr()
    assert "not on this machine" in refused(capsys, "serve", source)


@pytest.mark.parametrize("source", ["runs/lora", "runs/lora/model"])
def test_training_continues_with_the_adapters_of_a_run(home: Path, source: str) -> None:
    pytest.importorskip("peft")
    given(home, "qwen3")
    assert train(home, "lora", 0.1, *LORA) == 0
    words = ["--train.start", source, *STILL, "--checkpoint.keep", "9"]
    assert train(home, "more", 0.1, *words) == 0
    before, after = (
        {atom.name: atom.read("weights") for atom in weights_of(saved)}
        for saved in (
            CheckpointStore(home / "runs/lora/checkpoints").list()[-1],
            CheckpointStore(home / "runs/more/checkpoints").list()[0],
        )
    )
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(UserError, match=r"its adapters have rank = 4; remove model.lora.rank"):
        train(home, "bad", 0.1, *words, "--model.lora.rank", "8")


@pytest.mark.parametrize("masked", ["true", "false"])
def test_both_families_have_the_same_perplexities(home: Path, masked: str) -> None:
    """Whole and without stages, of weights that a rate of 1e-30 leaves as they were."""
    smollm2(home)
    words = ["--pipeline.stages", "3", "--data.document_mask", masked, *STILL]
    found = []
    for name, family in (("own", OWN), ("theirs", ("--model.family", "transformers"))):
        assert train(home, name, 1e-30, *words, *family) == 0
        assert cli.run(["eval", f"runs/{name}", "--omit", "0.3,0.6"]) == 0
        found.append(json.loads(Path(f"runs/{name}/omission.json").read_text()))
    own, theirs = found
    assert [row["stages"] for row in own] == [0, 1, 2] and own[0]["perplexity"] < own[1]["perplexity"] * 1e3
    for row, other in zip(own, theirs, strict=True):
        assert row.keys() == other.keys() and row["subsets"] == other["subsets"]
        for name in ("perplexity", "min_perplexity", "max_perplexity"):
            assert other[name] == pytest.approx(row[name], rel=1e-6)


def test_eval_of_a_run_equals_its_validation(home: Path) -> None:
    """Adapters are evaluated over their base; stages that are unlike may be left out."""
    pytest.importorskip("peft")
    given(home, "gemma2")
    for name, words in (("full", ()), ("lora", LORA)):
        assert train(home, name, 0.05, "--pipeline.stages", "4", *words) == 0
        assert cli.run(["eval", f"runs/{name}", "--omit", "0.25"]) == 0
        whole = json.loads(Path(f"runs/{name}/omission.json").read_text())[0]["perplexity"]
        *_, last = read_run(home / "runs" / name).validated
        assert torch.tensor(whole).log().item() == pytest.approx(last.val_loss, rel=1e-5)


def test_a_folder_is_evaluated_on_a_text(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = given(home, "mistral").eval()
    Path("short.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    assert cli.run(["eval", "given", "--text", "short.txt"]) == 0
    shown = capsys.readouterr().out
    assert perplexity_in(shown) == pytest.approx(perplexity_of(model, model, "short.txt"), rel=1e-4)
    assert "perplexity of given" in shown


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("kind", "format_"), [("gemma2", "dcp"), ("qwen3", "universal")])
def test_an_imported_checkpoint_resumes_like_a_native_one(home: Path, kind: str, format_: str) -> None:
    """Exported at 2 stages and imported at 4: losses equal those of a native resumption."""
    given(home, kind)
    assert train(home, "run", 1e-3) == 0
    assert cli.run(["export", "runs/run", "--format", format_, "--to", "out"]) == 0
    flags = ["--name", "back", "--pipeline.stages", "4"]
    assert cli.run(["checkpoint", "convert", "out", "--recipe", "runs/run", "--from", format_, *flags]) == 0
    more = ["--train.steps", "6", "--pipeline.stages", "4", "--quiet"]
    for name in ("run", "back"):
        assert cli.run(["train", "--resume", f"runs/{name}", *more]) == 0
    native, back = ({m.step: m.loss for m in read_run(home / "runs" / name).trained} for name in ("run", "back"))
    assert {step: native[step] for step in (4, 5)} == {step: back[step] for step in (4, 5)}


def test_adapters_are_not_imported(home: Path) -> None:
    pytest.importorskip("peft")
    given(home, "qwen3")
    assert train(home, "lora", 0.1, *LORA, *STILL) == 0
    assert cli.run(["export", "runs/lora", "--format", "dcp", "--to", "out"]) == 0
    with pytest.raises(UserError, match=r"model\.lora\.rank: adapters cannot be imported"):
        cli.run(["checkpoint", "convert", "out", "--recipe", "runs/lora", "--from", "dcp"])
