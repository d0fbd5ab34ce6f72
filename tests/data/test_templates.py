"""Documents and prompts have the ids of ``transformers``, BOS included; older runs resume without."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from unittest.mock import patch

import pytest

from planaria.config.schema import DataConfig, ModelConfig, RunConfig
from planaria.data.corpus import fingerprint
from planaria.data.shards import tokenise_corpus
from planaria.data.tokenizer import Tokenizer
from planaria.models.huggingface import export_model
from planaria.models.llama_stages import Llama
from planaria.runtime.api import completer as completing
from planaria.runtime.preparation import run_folders
from support.tokenizer_kinds import KINDS, saved, text

transformers = pytest.importorskip("transformers")
TEXTS = ["ab cd", "  two\n\nlines é的", text(3, 300, runs=False)]


def config(folder: Path, tokenizer: Path, **options: object) -> DataConfig:
    folder.mkdir(exist_ok=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    values = {"source": str(folder / "corpus.jsonl"), "tokenizer": str(tokenizer), "cache": str(folder / "cache")}
    return DataConfig.model_validate(values | {"validation": 0.0} | options)


def everything(data: DataConfig) -> list[int]:
    dataset = tokenise_corpus(data, 1000)
    return dataset.parts[""].read("train", 0, dataset.parts[""].tokens("train")).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_prompts_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    file = saved(kind, tmp_path / "model", "<s> $A")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "model"), Tokenizer.open(file)
    expected = [theirs(text)["input_ids"] for text in TEXTS]
    assert [ours.encode_prompt(text) for text in TEXTS] == expected
    assert everything(config(tmp_path, file)) == [i for ids in expected for i in (*ids, ours.end)]


def test_a_template_that_ends_with_the_separator_needs_no_other(tmp_path: Path) -> None:
    file = saved("byte level", tmp_path / "model", "<s> $A </s>")
    ours = Tokenizer.open(file)
    begin = ours.control_tokens["<s>"]
    assert (ours.before, ours.after) == ((begin,), (ours.end,))
    assert everything(config(tmp_path, file)) == [i for t in TEXTS for i in (begin, *ours.encode(t), ours.end)]
    assert ours.encode_prompt("ab") == [begin, *ours.encode("ab")], "a prompt is to be continued"


def test_a_separator_that_begins_a_text_is_not_repeated(tmp_path: Path) -> None:
    file = saved("byte level", tmp_path / "model", "</s> $A")
    ours = Tokenizer.open(file)
    assert everything(config(tmp_path, file)) == [ours.end, *(i for t in TEXTS for i in (*ours.encode(t), ours.end))]


def test_both_splits_begin_with_the_templates_token(tmp_path: Path) -> None:
    file = saved("byte level", tmp_path / "model", "<s> $A")
    dataset = tokenise_corpus(config(tmp_path, file, validation=0.3), 1000).parts[""]
    begin = Tokenizer.open(file).control_tokens["<s>"]
    for split in ("train", "validation"):
        ids = dataset.read(split, 0, dataset.tokens(split)).tolist()
        assert ids[0] == begin and ids.count(begin) == len(TEXTS)


def test_the_cache_key_changes_only_with_the_ids(tmp_path: Path) -> None:
    """The key of runs before data.tokenization, written out."""
    plain, begun = saved("byte level", tmp_path / "plain"), saved("byte level", tmp_path / "begun", "<s> $A")
    for file, kept in ((plain, True), (begun, False)):
        data = config(tmp_path, file)
        facts = f"1 {fingerprint(data)} {data.validation!r} {Tokenizer.open(file).to_json()}"
        before = hashlib.sha256(facts.encode()).hexdigest()[:24]
        legacy = tokenise_corpus(data.model_copy(update={"tokenization": "legacy"}), 1000)
        assert legacy.folder.name == before
        assert (tokenise_corpus(data, 1000).folder.name == before) == kept
        ours = Tokenizer.open(file)
        ids = [i for t in TEXTS for i in (*ours.encode(t), ours.end)]
        assert legacy.parts[""].read("train", 0, len(ids)).tolist() == ids


def test_a_run_older_than_the_setting_resumes_with_legacy_ids(tmp_path: Path) -> None:
    found = json.loads(RunConfig().model_dump_json())
    (tmp_path / run_folders.CONFIG).write_text(json.dumps(found))
    assert run_folders.config_of(tmp_path).data.tokenization == "exact"
    del found["data"]["tokenization"]
    (tmp_path / run_folders.CONFIG).write_text(json.dumps(found))
    assert run_folders.config_of(tmp_path).data.tokenization == "legacy"


def test_a_prompt_begins_with_the_templates_token(tmp_path: Path) -> None:
    file = saved("prepend", tmp_path, "<s> $A")
    model = ModelConfig(vocab=Tokenizer.open(file).vocab, dim=8, layers=1, heads=2, hidden=8, context=32)
    export_model(Llama(model), tmp_path / "model", file, Tokenizer.open(file).end)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    with patch("planaria.models.generate.generate", return_value=iter([])) as called:
        completing.complete(tmp_path / "model", "ab cd")
    assert called.call_args.args[1] == theirs("ab cd")["input_ids"] and theirs("ab cd")["input_ids"][0] == 1
