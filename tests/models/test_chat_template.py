"""Chats have the ids of ``transformers``, on any day and with any template; a hostile template is stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.data.tokenizer import Tokenizer
from planaria.models import chat
from planaria.models.chat import Turn, template_of
from planaria.models.chat_template import DATE, render_request
from support.tokenizer_kinds import saved

transformers = pytest.importorskip("transformers")
from transformers.utils import chat_template_utils  # noqa: E402

LOOP = "{% for m in messages %}"
TEMPLATES = {
    "bos, brackets": "{{ bos_token }}" + LOOP + "{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "names, no bos": LOOP + "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "a date, unguarded": "{{ bos_token }}Today is {{ strftime_now('%d %B %Y, %H:%M') }}\n"
    + LOOP
    + "{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}",
    "a date, if there is one": "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    + LOOP
    + "<s>{{ m['content'] }}{% endfor %}",
    "json": LOOP
    + "{{ m.content | tojson(ensure_ascii=False) }}{{ m.role | tojson(indent=2) }}"
    + "{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=True, separators=(',', ':')) }}{% endfor %}",
    "loop controls and tags": "{% set ns = namespace(last='') %}"
    + LOOP
    + "{% if loop.index > 9 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}"
    + "{% set ns.last = m.role %}{{ dict(role=ns.last).role }}</s>{% endfor %}{{ unk_token }}",
}
SOME = ("byte level", "prepend", "metaspace", "wordpiece")
TURNS: list[Turn] = [("user", " brown fox é "), ("assistant", "a b"), ("user", "cd, ab?")]
BOMBS = {
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'x' * (10 ** 10) }}",
    "an output": "{{ 'x' * 5000000 }}",
    "out of the sandbox": "{{ namespace(__class__=1) }}{{ messages.__class__.__mro__ }}",
}


def model(folder: Path, kind: str, template: str) -> Path:
    """A folder with a tokenizer that adds BOS to a text, and a chat template."""
    saved(kind, folder, "<s> $A")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def their_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the date of ``transformers`` to the fixed date used here."""

    class Fixed(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return DATE

    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)


@pytest.fixture(autouse=True, scope="module")
def no_child_is_left() -> Iterator[None]:
    yield
    chat._stop_renderer()


def ours(folder: Path, turns: list[Turn]) -> list[int]:
    template = template_of(folder)
    assert template is not None
    return template.ids(turns, opened(folder))


@cache
def _opened(source: str, file: Path) -> Tokenizer:
    return Tokenizer.open(file)


def opened(folder: Path) -> Tokenizer:
    return _opened((folder / "tokenizer.json").read_text(), folder / "tokenizer.json")


def theirs(folder: Path, turns: list[Turn]) -> list[int]:
    messages = [{"role": role, "content": content} for role, content in turns]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


@pytest.mark.usefixtures("their_day")
@pytest.mark.parametrize("kind", SOME)
def test_a_chat_has_the_ids_of_transformers(kind: str, tmp_path: Path) -> None:
    for name, template in TEMPLATES.items():
        folder = model(tmp_path, kind, template)
        assert ours(folder, TURNS) == theirs(folder, TURNS), name


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind whose template writes BOS and ends every turn."""
    template = "{{ bos_token }}" + LOOP + "{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    return {kind: model(tmp_path_factory.mktemp("model"), kind, template) for kind in SOME}


@pytest.mark.parametrize("kind", SOME)
@settings(max_examples=25)
@given(data=st.data())
def test_a_turn_contains_no_control_token(folders: dict[str, Path], kind: str, data: st.DataObject) -> None:
    """Turns contain fragments of control token names, also where they touch the template's text."""
    part = st.sampled_from(["<s>", "</s>", "<", "/s>", "s>", "<<s>", "</", "a", " ", "\n", "é", "\U000f0000"])
    text = "x" + "".join(data.draw(st.lists(part, max_size=6)))
    tokenizer = opened(folders[kind])
    ids = ours(folders[kind], [("user", text)])
    begin, end = tokenizer.control_tokens["<s>"], tokenizer.control_tokens["</s>"]
    assert (ids.count(begin), ids.count(end)) == (1, 1) and (ids[0], ids[-1]) == (begin, end)
    if kind == "byte level":
        assert tokenizer.decode(ids) == text.strip()


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_template_is_stopped(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "SECONDS", 1.0)
    folder = model(tmp_path, "byte level", BOMBS[name] + LOOP + "{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match=r"its chat template fails \(.*\); fix it, or remove it") as caught:
        ours(folder, TURNS)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert ours(model(tmp_path, "byte level", TEMPLATES["json"]), TURNS), "the next template is rendered"


@settings(max_examples=150)
@given(st.text(st.sampled_from("{%}- |.()[]'#msgaboixcontenrl0159*~+"), max_size=30))
def test_any_template_gives_a_text_or_a_one_line_error(text: str) -> None:
    for template in (text, "{{ " + text + " }}", "{% " + text + " %}"):
        try:
            render_request(json.dumps({"template": template, "values": [{"messages": []}]}).encode())
        except UserError as error:
            assert "\n" not in str(error) and str(error)


def test_a_forked_process_has_its_own_renderer(tmp_path: Path) -> None:
    folder = model(tmp_path, "byte level", TEMPLATES["json"])
    expected = ours(folder, TURNS)
    if not (child := os.fork()):
        os._exit(0 if ours(folder, TURNS) == expected and len(chat._RENDERERS) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert ours(folder, TURNS) == expected
