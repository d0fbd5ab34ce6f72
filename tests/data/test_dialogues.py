"""Dialogues: the tokens that are learned, and invalid dialogues."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.config.schema import DataConfig
from planaria.data.corpus import iter_documents, resolve_formats
from planaria.data.dialogues import dialogues
from planaria.data.shards import tokenise_corpus
from planaria.data.stream import Stream
from planaria.data.tokenizer import Tokenizer, load_tokenizer
from planaria.models import chat, chat_template
from planaria.models.chat import Template

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}[thought]{% endif %}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d")]


def turns(pairs: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def source(folder: Path, records: Sequence[Any], template: str | None = PLAIN, **fields: Any) -> DataConfig:
    """Data of these records, with a tokenizer of bytes."""
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    file = None if template is None else folder / "template.jinja"
    if file is not None:
        file.write_text(template or "")
    plain = {"source": str(folder / "records.jsonl"), "tokenizer": "bytes", "cache": str(folder / "cache")}
    given = {**plain, "template": file and str(file), "validation": 0.0, "format": "messages", **fields}
    return DataConfig.model_validate(given)


def read(data: DataConfig) -> list[tuple[str, str]]:
    """Return the text of each dialogue, and its learned part with other tokens as dots; 256 is written as $."""
    tokenizer = load_tokenizer(data, 257, Path(str(data.cache)))
    found = []
    for ids, learned in dialogues(data, tokenizer):
        text = "".join("$" if i == 256 else chr(i) for i in ids.tolist())
        found.append((text, "".join(c if one else "." for c, one in zip(text, learned.tolist(), strict=True))))
    return found


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_answers_are_learned_with_their_end_of_turn(tmp_path: Path, template: str) -> None:
    ((text, learned),) = read(source(tmp_path, [{"messages": turns(TALK)}], template))
    assert text == "<|user|>a?$<|assistant|>b$<|user|>c?$<|assistant|>d$"
    assert "".join(c for c in learned if c != ".") == "b$d$"
    assert learned.index("b") == text.index("b") and learned.rindex("d") == text.rindex("d")


def test_the_last_answer_or_all_tokens_can_be_learned(tmp_path: Path) -> None:
    ((text, last),) = read(source(tmp_path, [{"messages": turns(TALK)}], learn="last"))
    assert last == "." * (len(text) - 2) + "d$"
    ((text, whole),) = read(source(tmp_path, [{"messages": turns(TALK)}], learn="all"))
    assert whole == text


def test_a_template_that_rewrites_earlier_answers_is_refused_unless_the_last_is_learned(tmp_path: Path) -> None:
    talk = [{"messages": turns(TALK)}]
    with pytest.raises(UserError, match=r"records\.jsonl:1: messages\[1\]: .*set data\.learn = 'last'"):
        read(source(tmp_path, talk, FORGETFUL))
    ((_, learned),) = read(source(tmp_path, talk, FORGETFUL, learn="last"))
    assert learned.strip(".") == "[thought]d$"


def test_a_text_cannot_name_a_control_token(tmp_path: Path) -> None:
    ((text, _),) = read(source(tmp_path, [{"messages": turns([("user", "x<|end|>"), ("assistant", "y")])}]))
    assert text == "<|user|>x<|end|>$<|assistant|>y$"


def test_a_prompt_a_completion_and_a_key_cannot_name_a_control_token(tmp_path: Path) -> None:
    prompt = source(tmp_path, [{"prompt": "x<|end|>", "completion": "y<|end|>\ud800"}], format="prompt", template=None)
    assert read(prompt) == [("x<|end|>y<|end|>?$", "........y<|end|>?$")]
    tools = [{"messages": turns(TALK[:2]), "tools": [{"<|end|>": "\ud800"}], "chat_template_kwargs": {"a": "<|end|>"}}]
    ((text, _),) = read(source(tmp_path, tools, "{{ tools | tojson }}{{ a }}" + PLAIN))
    assert text == '[{"<|end|>": "?"}]<|end|><|user|>a?$<|assistant|>b$'


class Here:
    """Renders in this process."""

    def __init__(self) -> None:
        self.answered: list[int] = []
        """spans in each reply"""

    def call(self, argument: bytes, *_: object) -> bytes:
        reply = chat_template.render_request(argument)
        self.answered += [len(json.loads(reply)[1])] if "answers" in json.loads(argument) else []
        return reply


def test_many_answers_are_rendered_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk, here = [{"messages": turns(TALK * 5)}], Here()
    monkeypatch.setattr(chat, "_renderer", lambda: here)
    looking_ahead = "{% set ahead = messages[-1].role %}" + PLAIN
    whole = read(source(tmp_path, talk, looking_ahead))
    assert here.answered == [10] and whole == read(source(tmp_path, talk))
    here.answered.clear()
    monkeypatch.setattr(chat_template, "_AT_ONCE", 500)
    assert read(source(tmp_path, talk, looking_ahead)) == whole
    assert sum(here.answered) == 10 and 1 < len(here.answered) < 10


LINEAR = {
    "plain": PLAIN,
    "default system": "{% for m in messages %}{% if loop.first and messages[0].role != 'system' %}<|system|>be<|end|>"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "stripped": "{% set all = messages %}{% for m in all %}{% set text = m.content | trim %}"
    "{{ '<|' + m.role + '|>' + text }}<|end|>\n{% endfor %}{{ '<|assistant|>' if add_generation_prompt else '' }}",
    "end": PLAIN + "{{ '' if add_generation_prompt else '<|end|>' }}",
    "strict": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('x') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "other prompt": PLAIN.replace("%}<|assistant|>", "%}<|robot|>"),
    "second": "{% if messages[1] is defined %}{{ messages[1].role }}{% endif %}" + PLAIN,
    "prompt in turns": "{% for m in messages %}{{ '!' if add_generation_prompt }}<|{{ m.role }}|>{{ m.content }}"
    "{% endfor %}",
}
"""templates that write one message after another"""
OTHERS = {
    "forgetful": FORGETFUL,
    "reasoning": "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content if loop.index0 > ns.last else m.content.split('x')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "last": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{% if loop.last and add_generation_prompt %}<|assistant|>{% endif %}{% endfor %}",
    "count": "{{ messages | length }}" + PLAIN,
    "slice": PLAIN.replace("in messages", "in messages[1:]"),
    "joiner": "{% set comma = joiner(',') %}" + PLAIN.replace("{{ m.content }}", "{{ comma() }}{{ m.content }}"),
    "carried": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}<|{{ m.role }}|>"
    "{{ m.content }}{% endfor %}{{ ns.n }}",
    "break": "{% for m in messages %}{% if m.content == 'x' %}{% break %}{% endif %}<|{{ m.role }}|>{{ m.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "generator": "{% set g = 'abcdefghijklm' | map('upper') %}{% for m in messages %}{{ g | first }}<|{{ m.role }}|>"
    "{{ m.content }}{% endfor %}{{ g | first }}",
}
"""templates that look at later messages, or carry state from one to the next"""


def by_prefixes(template: Template, messages: list[dict[str, str]], wanted: list[int]) -> object:
    """The answers from the texts of all beginnings of a dialogue, or the error."""

    def rendered(count: int, prompt: bool) -> str:
        values = {"messages": messages[:count], "add_generation_prompt": prompt, "tools": None}
        (text,) = template.render([values], "fix")
        return text

    full, spans = rendered(len(messages), False), []
    for number in wanted:
        before, after = rendered(number, True), rendered(number + 1, False)
        same = full.startswith(after) and after.startswith(before)
        spans.append((len(before), len(after)) if same else None)
    return full, spans


def answers(template: Template, messages: list[dict[str, str]], wanted: list[int]) -> object:
    values = {"messages": messages, "add_generation_prompt": False, "tools": None}
    full, spans = template.answers(values, wanted, "fix")
    return full, [span and tuple(span) for span in spans]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([*LINEAR, *OTHERS]),
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text("x <|\n", max_size=4)), min_size=1, max_size=9),
)
def test_answers_are_those_of_all_prefixes(
    monkeypatch: pytest.MonkeyPatch, name: str, pairs: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(chat, "_renderer", Here)
    template, messages = Template(Path(name), (LINEAR | OTHERS)[name]), turns(pairs)
    wanted = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    found = []
    for way in (by_prefixes, answers):
        try:
            found.append(way(template, messages, wanted))
        except UserError as error:
            found.append(str(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_templates_that_write_one_message_after_another_render_no_prefixes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, render = list[int](), jinja2.Template.render

    def counted(self: jinja2.Template, **values: Any) -> str:
        calls.append(len(values["messages"]))
        return render(self, **values)

    monkeypatch.setattr(chat, "_renderer", Here)
    monkeypatch.setattr(jinja2.Template, "render", counted)
    answers(Template(Path(name), (LINEAR | OTHERS)[name]), turns(TALK * 10), list(range(1, 40, 2)))
    expected = {"prompt in turns": 43, "generator": 45}  # after two renderings, and two more to verify an answer
    assert len(calls) == expected.get(name, 41 if name in OTHERS else 7)


def test_a_table_has_no_null_fields_and_may_have_dates(tmp_path: Path) -> None:
    """Parquet gives every message the fields of all others."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}
    rows = [[{"role": "user", "content": "q", "at": date(2024, 1, 2)}, call], turns(TALK[:2])]
    parquet.write_table(pa.Table.from_pylist([{"messages": row} for row in rows]), tmp_path / "talks.parquet")
    template = PLAIN.replace(
        "{{ m.content }}", "{% if 'tool_calls' in m %}{{ m.tool_calls[0].name }}!{% else %}{{ m.content }}{% endif %}"
    )
    data = source(tmp_path, [], template).model_copy(update={"source": str(tmp_path / "talks.parquet")})
    assert [text for text, _ in read(data)] == ["<|user|>q$<|assistant|>f!$", "<|user|>a?$<|assistant|>b$"]
    null = [{"messages": [{**message, "tool_calls": None} for message in turns(TALK[:2])]}]
    assert read(source(tmp_path, null, template))[0][0] == "<|user|>a?$<|assistant|>b$"


def test_a_folder_may_have_json_files_without_dialogues(tmp_path: Path) -> None:
    data, reports = source(tmp_path, [{"messages": turns(TALK)}], format="auto"), list[str]()
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "records.jsonl").rename(folder / "records.jsonl")
    (folder / "a.json").write_text('{"version": 1}')
    (folder / "b.json").write_text("[1]")
    data = resolve_formats(data.model_copy(update={"source": str(folder)}))
    assert data.format == "messages" and tokenise_corpus(data, 257, reports.append, 63).meta.documents == 1
    assert any(line.startswith("skipped a.json: no records with 'messages'") for line in reports)
    alone = data.model_copy(update={"source": str(folder / "a.json")})
    with pytest.raises(UserError, match=r"a\.json: no records with 'messages'"):
        tokenise_corpus(alone, 257, context=63)


def test_only_messages_count_as_the_text_of_a_dialogue(tmp_path: Path) -> None:
    """Not a record's other keys, of which Parquet files read none."""
    record = {"id": "x" * 99, "messages": turns(TALK)}
    data = source(tmp_path, [record], template=PLAIN)
    assert [*iter_documents(data)] == ["a?\nb\nc?\nd"]


def test_prompts_with_completions_need_no_template(tmp_path: Path) -> None:
    records = [
        {"prompt": "1 + 1 =", "completion": " 2"},
        {"prompt": turns(TALK[:3]), "completion": turns(TALK[3:])},
    ]
    assert read(source(tmp_path, records[:1], format="prompt", template=None)) == [("1 + 1 = 2$", "....... 2$")]
    _, (text, learned) = read(source(tmp_path, records, format="prompt"))
    assert learned == "." * (len(text) - 2) + "d$"
    with pytest.raises(UserError, match=r"holds dialogues, but data\.tokenizer = 'bytes' has no chat template"):
        read(source(tmp_path, records, format="prompt", template=None))


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        ({"messages": []}, r"records\.jsonl:1: messages: an empty list"),
        ({"messages": "hello"}, r"messages: a value of type str, not a list"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]: not an object with 'role'"),
        ({"messages": [{"role": "user", "content": [1]}]}, r"messages\[0\]: its content is not text"),
        ({"message": []}, r"records\.jsonl:1: no 'messages' \(did you mean 'message'\?\)"),
        ({"messages": turns(TALK), "chat_template_kwargs": 3}, r"chat_template_kwargs: a value of type int"),
        ({"messages": turns([("us\ud800er", "a")])}, r"messages\[0\]: its role is not a word, but 'us\\ud800er'"),
        ({"messages": turns([("user|><|end", "a")])}, r"messages\[0\]: its role is not a word, but 'user"),
        ({"messages": turns(TALK), "tools": json.loads("[" * 900 + "]" * 900)}, r"jsonl:1: nested too deeply"),
    ],
)
def test_a_record_without_a_dialogue_is_refused(tmp_path: Path, record: dict[str, Any], wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        read(source(tmp_path, [record]))


def test_the_format_is_that_of_the_first_record(tmp_path: Path) -> None:
    def found(record: dict[str, Any]) -> DataConfig:
        return resolve_formats(source(tmp_path, [record], format="auto"))

    assert found({"messages": turns(TALK)}).format == "messages" and found({"messages": turns(TALK)}).document_mask
    assert found({"prompt": "a", "completion": "b"}).format == "prompt"
    assert found({"text": "a", "prompt": "a", "completion": "b"}).format == "auto"
    assert not found({"text": "a"}).document_mask
    assert not resolve_formats(source(tmp_path, [{"messages": turns(TALK)}], format="auto", pack=False)).document_mask
    with pytest.raises(ValueError, match=r"document_mask = false.*set data\.pack = false"):
        source(tmp_path, [{"messages": turns(TALK)}], document_mask=False)


@pytest.mark.parametrize("pack", [True, False])
def test_rows_hold_whole_dialogues_and_count_their_targets(tmp_path: Path, pack: bool) -> None:
    records = [{"messages": turns([("user", "q" * (n % 7)), ("assistant", "a" * (n % 5 + 1))])} for n in range(40)]
    data, reports = source(tmp_path, records, pack=pack, validation=0.25), list[str]()
    dataset = tokenise_corpus(data, 257, reports.append, context=63)
    assert any("of the tokens are learned" in line for line in reports)
    seen = []
    for split in ("train", "validation"):
        stream = Stream(dataset, split, 63, seed=1)
        for n in range(stream.windows):
            tokens, targets = stream.batch(n, 1)
            numbers = stream.documents(n, tokens)[0]
            text = "".join("$" if i == 256 else chr(i) for i in tokens[0].tolist())
            wanted = [chr(i) if i != 256 else "$" for i in targets[0].tolist() if i >= 0]
            assert stream.learned(n, 1).sum() == len(wanted)
            found = [part for part in text.split("<|user|>") if part]
            assert pack or len(found) == 1
            assert "".join(c for c in wanted if c == "a").count("a") == sum(part.count("a") for part in found) - sum(
                part.count("<|assistant|>") * 2 for part in found
            )
            begins = [at for at in range(len(text)) if text.startswith("<|user|>", at)]
            assert [int(numbers[at]) for at in begins] == [*range(1, len(begins) + 1)]
            seen += found
    assert len(seen) == 40 and len([*seen]) == dataset.meta.documents
    assert dataset.meta.row == 64 and dataset.tokens("validation") > 0


def test_long_dialogues_are_cut_and_silent_ones_left_out(tmp_path: Path) -> None:
    long = {"messages": turns([("user", "q"), ("assistant", "a" * 200)])}
    silent = {"messages": turns([("user", "q" * 200), ("assistant", "a")])}
    data = source(tmp_path, [long, silent, {"messages": turns([("user", "q")])}])
    for _ in ("tokenised", "cached"):
        reports: list[str] = []
        assert tokenise_corpus(data, 257, reports.append, 63).meta.documents == 1
        assert reports[-1].endswith("1 cut at 64 tokens (model.context + 1), 2 skipped that have none")
    assert len(reports) == 1
    with pytest.raises(UserError, match=r"learn among its first 64, but 1 have one later; use a larger model.context"):
        tokenise_corpus(source(tmp_path, [silent]), 257, context=63)


def test_only_training_reads_dialogues(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.format = 'messages': only training"):
        tokenise_corpus(source(tmp_path, [{"messages": turns(TALK)}]), 257)


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    """Also for text that a byte-pair tokenizer would join across the parts."""
    transformers = pytest.importorskip("transformers")
    words = tmp_path / "words.txt"
    words.write_text("hello world, the answer is forty-two. " * 50)
    own = load_tokenizer(DataConfig(source=str(words), cache=str(tmp_path)), 300, tmp_path)
    own.save(tmp_path / "tokenizer.json")
    library = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    talk = turns([("user", "hello  world"), ("assistant", "the answer, é"), ("user", "is"), ("assistant", " 42 ")])
    data = source(tmp_path, [{"messages": talk}], TAGGED, tokenizer=str(tmp_path / "tokenizer.json"))
    ((ids, learned),) = dialogues(data, Tokenizer.open(tmp_path / "tokenizer.json"))
    theirs = library.apply_chat_template(
        talk, chat_template=TAGGED, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    assert ids.tolist() == theirs["input_ids"]
    assert learned.tolist() == [bool(one) for one in theirs["assistant_masks"]]
