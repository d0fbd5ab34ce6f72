"""The same dialogues and weights through TRL's SFTTrainer: equal token ids, targets and losses."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import planaria
from planaria.config.schema import RunConfig
from planaria.data.dialogues import dialogues
from planaria.data.records import Record
from planaria.data.shards import tokenise_corpus
from planaria.data.stream import Stream
from planaria.data.tokenizer import Tokenizer

pytestmark = pytest.mark.slow  # requires TRL: pip install -c constraints.txt -e ".[hf,trl]"

CONTEXT, STEPS, RATE = 63, 3, 1e-3
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    """TRL if installed; imported here because that takes seconds."""
    found: ModuleType = pytest.importorskip("trl")
    found.SFTTrainer  # noqa: B018  (lazy attribute: imports the trainer and its dependencies)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaMA with a tokenizer of bytes and a chat template, and dialogues of one or two answers."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    home = tmp_path_factory.mktemp("trl")
    alphabet = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    library = Library(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_special_tokens(["<|end|>"])
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|end|>", pad_token="<|end|>")
    own.chat_template = TEMPLATE
    own.save_pretrained(home)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet), num_hidden_layers=2, tie_word_embeddings=True, initializer_range=0.1, **shape
    )
    transformers.LlamaForCausalLM(config).save_pretrained(home)
    (home / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks(24)))
    return home


def talks(count: int) -> list[list[dict[str, str]]]:
    """Return dialogues with answers of unequal length; one of eight is cut at ``CONTEXT`` + 1 tokens."""
    rng, found = random.Random(7), []
    for number in range(count):
        turns = []
        for _ in range(2 if number % 8 == 0 else 1):
            turns.append({"role": "user", "content": "".join(rng.choices("abcd ", k=rng.randint(1, 9)))})
            turns.append({"role": "assistant", "content": "".join(rng.choices("efgh é", k=rng.randint(1, 24)))})
        found.append(turns)
    return found


def recipe(folder: Path, out: Path, family: str, pack: bool, microbatches: int, size: int) -> RunConfig:
    return planaria.configure(
        RunConfig(name="run", out=str(out), engine="inline"),
        settings={
            "model.family": family, "model.context": CONTEXT, "pipeline.stages": 1, "data.format": "messages",
            "pipeline.microbatches": microbatches, "pipeline.microbatch_size": size, "data.pack": pack,
            "data.source": str(folder / "talks.jsonl"), "data.cache": str(folder / "cache"), "data.validation": 0.0,
            "optim.lr": RATE, "optim.clip": 0.0, "train.steps": STEPS, "train.eval_every": 0,
            "train.start": str(folder), "checkpoint.every": 0, "recovery.strategy": "checkpoint",
        },
    )  # fmt: skip


def trainer(
    trl: ModuleType, folder: Path, out: Path, records: Sequence[Record], **settings: Any
) -> tuple[Any, list[float]]:
    """Return a trainer of these records in fp32, and the list that its loss of each microbatch goes to."""
    transformers, datasets = (importlib.import_module(name) for name in ("transformers", "datasets"))
    arguments = trl.SFTConfig(
        output_dir=str(out), assistant_only_loss="messages" in records[0], max_length=CONTEXT + 1,
        max_steps=STEPS, learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=0.0,
        use_cpu=True, bf16=False, activation_checkpointing=False, report_to="none", save_strategy="no",
        disable_tqdm=True, **settings,
    )  # fmt: skip
    made = trl.SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(list(records)),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    found, step = list[float](), made.training_step

    def noted(*given: Any, **named: Any) -> Any:
        loss = step(*given, **named)
        found.append(loss.item())
        return loss

    made.training_step = noted
    return made, found


@pytest.mark.parametrize("kind", ["messages", "prompts of messages", "prompts of text"])
def test_the_same_tokens_are_learned(trl: ModuleType, folder: Path, tmp_path: Path, kind: str) -> None:
    records = of_kind(kind)
    theirs, _ = trainer(trl, folder, tmp_path, records)
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = recipe(folder, tmp_path, "llama", False, 6, 4).data
    data = data.model_copy(update={"source": str(file), "format": kind.partition("s ")[0]})
    found = [(ids[: CONTEXT + 1], learned[: CONTEXT + 1]) for ids, learned in dialogues(data, tokenizer(folder))]
    ours = [(ids.tolist(), learned.tolist()) for ids, learned in found if learned.any()]
    assert len(ours) == len(theirs.train_dataset) > 20
    for (ids, learned), record in zip(ours, theirs.train_dataset, strict=True):
        assert ids == record["input_ids"]
        assert [i if one else -100 for i, one in zip(ids, learned, strict=True)] == record["labels"]


def of_kind(kind: str) -> list[Record]:
    """Return the dialogues as messages, or as prompts and completions."""
    if kind == "messages":
        return [{"messages": talk} for talk in talks(24)]
    if kind == "prompts of messages":
        return [{"prompt": talk[:-1], "completion": talk[-1:]} for talk in talks(24)]
    return [{"prompt": talk[-2]["content"], "completion": talk[-1]["content"]} for talk in talks(24)]


def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.open(folder / "tokenizer.json")


@pytest.mark.parametrize("family", ["llama", "transformers"])
@pytest.mark.parametrize("pack", [False, True])
def test_losses_agree(trl: ModuleType, folder: Path, tmp_path: Path, family: str, pack: bool) -> None:
    """A step has all dialogues, so that their order does not matter, nor which of them share a row.

    Both sides pack with their own code. Without flash attention, TRL's model separates dialogues by position ids.
    """
    if pack:
        alone = recipe(folder, tmp_path, family, True, 1, 1)
        rows = Stream(tokenise_corpus(alone.data, alone.model.vocab, context=CONTEXT), "train", CONTEXT, 1).windows
        own, parts = recipe(folder, tmp_path, family, True, rows, 1), 1
        size = {"packing": True, "per_device_train_batch_size": 1}
        theirs, losses = trainer(trl, folder, tmp_path, of_kind("messages"), **size)
        parts = theirs.args.gradient_accumulation_steps = len(theirs.train_dataset)
        assert 1 < parts < 24 and 1 < rows < 24
    else:
        own, parts = recipe(folder, tmp_path, family, False, 6, 4), 3
        size = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": parts}
        theirs, losses = trainer(trl, folder, tmp_path, of_kind("messages"), **size)
    theirs.train()
    found: list[float] = []
    planaria.train(own, progress=False, on_step=lambda step: found.append(step.loss))
    steps = [sum(losses[at : at + parts]) for at in range(0, len(losses), parts)]
    assert len(found) == len(steps) == STEPS and abs(steps[0] - steps[-1]) > 1e-2
    assert found[0] == pytest.approx(steps[0], abs=1e-6)
    assert found == pytest.approx(steps, rel=1e-6)
