"""``planaria generate --chat``: a conversation on a pipe and on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from planaria.common.errors import UserError
from planaria.data.tokenizer import Tokenizer
from planaria.models.chat import Template, template_of
from planaria.models.generate import texts
from planaria.models.sampling import Sampling
from planaria.runtime.api import chat
from planaria.runtime.api.chat import Chat, converse
from planaria.runtime.api.completer import Completer
from planaria.swarm.audit.leakage_measurement import encode_chat
from planaria.swarm.policy.policies import open_policy
from support.command_line import refused
from support.decoder_folders import given, train

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GREEDY = ("--temperature", "0", "--tokens", "6")


def instruct(folder: Path, kind: str) -> None:
    """Save a small model with a chat template in ``folder``/given."""
    given(folder, kind)
    inner = tokenizers.Tokenizer.from_file(str(folder / "given/tokenizer.json"))
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    inner.save(str(folder / "given/tokenizer.json"))
    (folder / "given/chat_template.jinja").write_text(CHATML)
    config = folder / "given/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 256}))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of both families from one LLaMA, of adapters over a Qwen3, and from random weights."""
    pytest.importorskip("peft")
    home, before = tmp_path_factory.mktemp("chat"), Path.cwd()
    (home / "other").mkdir()
    instruct(home, "llama")
    instruct(home / "other", "qwen3")
    os.chdir(home)
    try:
        short = ("--train.steps", "1", "--train.eval_every", "0")
        for family in ("llama", "transformers"):
            assert train(home, family, 1e-30, "--model.family", family, *short) == 0
        lora = ("--train.start", "other/given", "--model.lora.rank", "4")
        assert train(home, "lora", 1e-2, *lora, *short) == 0
    finally:
        os.chdir(before)
    return home


class Scripted(Completer):
    """Gives fixed answers as tokens, and keeps the conversations that it was given."""

    def __init__(self, answers: Sequence[str], context: int = 1000) -> None:
        inner = tokenizers.Tokenizer(tokenizers.models.BPE({chr(n): n for n in range(128)}, []))
        inner.decoder = tokenizers.decoders.Fuse()
        inner.add_special_tokens(["<|end|>", "<|im_start|>", "<|im_end|>"])
        self.tokenizer = Tokenizer(inner, 128)
        self.place, self.vocab, self.context, self.ends = Path("runs/x"), 131, context, ()
        self.template = Template(self.place, CHATML)
        self.seen: list[str] = []
        self.draws: list[Sampling] = []
        self._answers = iter(answers)

    def generate(self, tokens: Sequence[int], draws: Sampling, stops: Collection[int] = ()) -> Iterator[int]:
        self.seen.append(self.tokenizer._inner.decode([*tokens], skip_special_tokens=False))
        self.draws.append(draws)
        drawn = self.tokenizer.encode_marked(next(self._answers))[: draws.max_new]
        return iter(drawn[: next((n for n, one in enumerate(drawn) if one in stops), len(drawn))])


def reply_to(talk: Chat, message: str) -> str:
    return "".join(talk.answer(message))


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def test_a_conversation_is_kept_and_answers_end_with_their_turn() -> None:
    notes: list[str] = []
    model = Scripted(["Aha<|im_end|>\n<|im_start|>user\nno", "Oho<|end|>x", "cut<|im_end|>"])
    talk = Chat(model, Sampling(4, seed=7), notes.append)
    assert [reply_to(talk, "One"), reply_to(talk, "Two"), reply_to(talk, "<|im_end|>")] == ["Aha", "Oho", "cut"]
    first = turn("user", "One")
    assert model.seen[0] == first + "<|im_start|>assistant\n"
    assert model.seen[1] == first + turn("assistant", "Aha") + turn("user", "Two") + "<|im_start|>assistant\n"
    assert model.seen[2].count("<|im_start|>") == 6 and len({draws.seed for draws in model.draws}) == 3
    assert notes == []


def test_an_answer_that_is_cut_is_reported() -> None:
    notes: list[str] = []
    talk = Chat(Scripted(["abcdefgh", "ab"]), Sampling(4), notes.append)
    assert [reply_to(talk, "One"), reply_to(talk, "Two")] == ["abcd", "ab"]
    assert notes == ["the answer was cut after 4 tokens (--tokens 4, context 1000)"]


def test_the_oldest_turns_are_left_out_when_the_context_is_full() -> None:
    notes: list[str] = []
    model = Scripted(["a" * 9] * 9, context=100)
    talk = Chat(model, Sampling(20), notes.append)
    for number in range(5):
        assert reply_to(talk, f"{number}" * 10) == "a" * 9
    assert "0" not in model.seen[-1] and "4" * 10 in model.seen[-1] and "3" * 10 in model.seen[-1]
    assert notes[0] == "the oldest 2 turns no longer fit the context of 100 tokens and were dropped"
    with pytest.raises(UserError, match=r"the message has \d+ tokens, the model reads 100; shorten it"):
        reply_to(talk, "b" * 100)


def test_on_a_terminal_errors_and_ctrl_c_end_an_answer_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, notes = Scripted(["yes"], context=60), list[str]()

    def interrupted(tokens: Sequence[int], draws: Sampling, stops: Collection[int] = ()) -> Iterator[int]:
        model.generate = Scripted.generate.__get__(model)  # type: ignore[method-assign]
        yield 65
        raise KeyboardInterrupt

    model.generate = interrupted  # type: ignore[method-assign]
    typed = iter(["stop me", "b" * 90, " ", "and?"])

    def read(prompt: str) -> str:
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr(chat, "Completer", lambda _: model)
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert converse(Path("runs/x"), Sampling(9), notes.append) == 0
    assert capsys.readouterr().out == "A\n\nyes\n\n"
    assert len(notes) == 1 and notes[0].startswith("chat: the message has")
    assert model.seen == [turn("user", "and?") + "<|im_start|>assistant\n"]


def process(*words: str) -> list[str]:
    return [sys.executable, "-m", "planaria", "generate", *words, "--chat", *GREEDY]


def answers(source: Path) -> list[str]:
    talk = Chat(Completer(source), Sampling(6), lambda _: None)
    return [reply_to(talk, "What is a fox?"), reply_to(talk, "And a dog?")]


def test_every_kind_of_model_answers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights answer alike in both families, in runs and in folders."""
    monkeypatch.chdir(home)
    found = answers(home / "runs/llama")
    assert all(found)
    for source in ("llama/model", "transformers", "transformers/model"):
        assert answers(home / "runs" / source) == found
    assert answers(home / "runs/lora") == answers(home / "runs/lora/model") != found
    served = open_policy(str(home / "runs/lora/model"))
    ids, completer = encode_chat(served, "What is a fox?"), Completer(home / "runs/lora")
    torch.testing.assert_close(served.logits(torch.tensor([ids])), completer.logits(torch.tensor([ids])))


@pytest.mark.slow_after(1)
def test_lines_of_a_pipe_are_answered(home: Path) -> None:
    text = "What is a fox?\n\nAnd a dog?\n"
    done = subprocess.run(process("runs/transformers"), input=text, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{answer}\n" for answer in answers(home / "runs/llama"))


def test_a_message_is_rendered_as_by_the_server(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Completer(home / "runs/llama")
    policy = open_policy(str(home / "runs/llama/model"))
    template = template_of(home / "runs/llama/model")
    assert model.template is not None and template is not None and model.template.text == template.text
    ids = encode_chat(policy, "What is a <|im_end|>?")
    expected = "".join(texts(model.generate(ids, Sampling(6)), model.tokenizer.decode))
    assert reply_to(Chat(model, Sampling(6), lambda _: None), "What is a <|im_end|>?") == expected
    assert policy.end in Chat(model, Sampling(6), lambda _: None)._stops


@pytest.mark.slow_after(1)
def test_a_terminal_is_left_with_ctrl_d(home: Path) -> None:
    ours, theirs = pty.openpty()
    talk = subprocess.Popen(
        process("runs/llama"), stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, cwd=home, close_fds=True
    )
    os.close(theirs)
    shown = ""

    def until(count: int) -> None:
        nonlocal shown
        while shown.count("> ") < count:
            shown += os.read(ours, 1024).decode(errors="replace")

    until(1)
    os.write(ours, b"What is a fox?\n")
    until(2)
    os.write(ours, b"\x04")
    assert talk.wait(60) == 0
    os.close(ours)


def test_models_without_a_template_and_other_flags_are_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(tmp_path, "llama")
    capsys.readouterr()
    line = refused(capsys, "generate", tmp_path / "given", "--chat", silent=True)
    assert "has no chat template" in line and "or use --prompt" in line
    words: list[tuple[Any, ...]] = [("--prompt", "a"), ("--task", "programs:x"), ("--problem", 1), ("--as", "vote")]
    for flag in words:
        assert f"{flag[0]} {flag[1]} cannot be combined" in refused(capsys, "generate", "x", "--chat", *flag)
    assert "tokens = 0" in refused(capsys, "generate", home / "runs/llama", "--chat", "--tokens", "0", silent=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("b" * 300))
    assert "shorten it" in refused(capsys, "generate", home / "runs/llama", "--chat", silent=True)
