"""Dialogues as token ids, which of these a model learns, and rows of dialogues.

A record holds ``messages`` (role and content), or a ``prompt`` and its ``completion`` (texts or messages). A chat
template makes one text of a dialogue, which is tokenised as a whole. ``{% generation %}`` tags in the template enclose
the answers. Without them an answer is found by prefixes: it is what the template adds to the dialogue before it, and
includes the end-of-turn token. Rows are samples of equal length, each with whole dialogues or one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planaria.common.errors import UserError, suggestion
from planaria.config.names import expand_home
from planaria.config.schema import DataConfig
from planaria.data.corpus import iter_source_records
from planaria.data.dataset import LEARNED, START
from planaria.data.records import REQUIRED, Record
from planaria.data.tokenizer import END, Tokenizer
from planaria.models.chat import Conversation, DialogueSegments, Template, read_template, template_of

OPEN = 256
"""rows that may still take a dialogue; more take more memory and hardly fewer rows"""
Row = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]
"""ids and marks"""
Message = Mapping[str, Any]
OWN = ("bpe", "bytes")
"""tokenizers without a chat template"""
_ROLE = re.compile(r"[\w .-]{1,64}")
"""roles, which templates write between control tokens: none can name one as a whole"""


class Dialogue(NamedTuple):
    """Token ids, uint32 [n], and whether each is learned, bool [n]."""

    ids: npt.NDArray[np.uint32]
    learned: npt.NDArray[np.bool_]


def dialogues(
    config: DataConfig, tokenizer: Tokenizer, on_progress: Callable[[str], None] | None = None
) -> Iterator[Dialogue]:
    """Yield every dialogue of a source.

    :raises UserError: naming file and record, if a record is not a dialogue or the chat template cannot render it; or
        if there is no template.
    """
    template = None if config.format == "prompt" else chat_template(config)
    for record, location in iter_source_records(config, on_progress):
        messages, first, texts = _read(record, config.format, location)
        if texts is not None:
            learned, (plain, mark) = (config.learn == "all", True), Conversation(texts).guard(tokenizer)
            pairs = tokenizer.encode_segments(plain.content, mark)
            ids = [*tokenizer.before, *(i for i, _ in pairs), tokenizer.end]
            marks = [*(False for _ in tokenizer.before), *(learned[segment] for _, segment in pairs), True]
        else:
            template = template or chat_template(config)
            segments = _trained_segments(config, template, tokenizer, record, messages, first, location)
            pairs = tokenizer.encode_segments([text for text, _ in segments.parts], segments.mark)
            ids, marks = [i for i, _ in pairs], [segments.parts[segment][1] for _, segment in pairs]
        yield Dialogue(np.array(ids, np.uint32), np.array(marks, np.bool_))


def chat_template(config: DataConfig) -> Template:
    """Return the chat template of a source of dialogues: that of ``data.template``, or the tokenizer's.

    :raises UserError: if there is none.
    """
    is_trained_here = config.tokenizer in OWN
    tokenizer_folder = None if is_trained_here else expand_home(config.tokenizer)
    if tokenizer_folder is not None and tokenizer_folder.suffix == ".json":
        tokenizer_folder = tokenizer_folder.parent
    path = tokenizer_folder if config.template is None else expand_home(config.template)
    if path is not None and not path.exists():
        raise UserError(f"data.template = {config.template!r}: no such file or folder; check the path")
    named = template_of(tokenizer_folder) if tokenizer_folder is not None else None
    if path is not None and path.is_file() and path != tokenizer_folder:
        names = named.names if named is not None else (("bos_token", ""), ("eos_token", END))
        return read_template(path, names)
    template = named if path == tokenizer_folder else template_of(path) if path is not None else None
    if template is None:
        of = f"data.tokenizer = {config.tokenizer!r}" if config.template is None else f"data.template = {str(path)!r}"
        raise UserError(
            f"data.source = {config.source!r} holds dialogues, but {of} has no chat template; set data.template to a "
            "Jinja file, or to the folder or GGUF file of a model that has one"
        )
    return template


def training_template(config: DataConfig) -> Template | None:
    """Return the chat template of the first source of dialogues, or None without such a source or a template."""
    for source in config.sources.values():
        if source.dialogues:
            try:
                return chat_template(source)
            except UserError:
                if source.format == "messages":
                    raise
    return None


def _read(record: Record, kind: str, location: str) -> tuple[list[Message], int, tuple[str, str] | None]:
    """Return a record's messages and the number of the first that may be learned; or its prompt and completion."""
    for key in REQUIRED[kind]:
        if key not in record:
            raise UserError(f"{location}: no {key!r} ({suggestion(key, record)}); fix the record, or set data.format")
    if kind == "messages":
        return _require_messages(record["messages"], f"{location}: messages"), 0, None
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [], 0, (prompt, completion)
    requested = _require_messages(prompt, f"{location}: prompt")
    return [*requested, *_require_messages(completion, f"{location}: completion")], len(requested), None


def _require_messages(value: object, location: str) -> list[Message]:
    """:raises UserError: if the value is not a list of messages."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{location}: {_type_name(value)}, not a list of messages; fix or remove the record")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"{location}[{number}]: not an object with 'role' and 'content'; fix or remove the record")
        if not _ROLE.fullmatch(message["role"]):
            raise UserError(
                f"{location}[{number}]: its role is not a word, but {message['role']!a:.40}; fix the record"
            )
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise UserError(f"{location}[{number}]: its content is not text; fix or remove the record")
    # Templates ask whether a message has a key, and tables have all keys in all messages.
    return [{key: inner for key, inner in each.items() if inner is not None or key == "content"} for each in value]


def _type_name(value: object) -> str:
    return "an empty list" if value == [] else f"a value of type {type(value).__name__}"


def _trained_segments(
    config: DataConfig,
    template: Template,
    tokenizer: Tokenizer,
    record: Record,
    messages: Sequence[Message],
    first: int,
    location: str,
) -> DialogueSegments:
    """Return the parts of a dialogue's text, each with whether it is learned."""
    settings = record.get("chat_template_kwargs") or {}
    if not isinstance(settings, Mapping):
        raise UserError(
            f"{location}: chat_template_kwargs: {_type_name(settings)}, not an object; fix or remove the record"
        )
    answers = [n for n, message in enumerate(messages) if n >= first and message["role"] == "assistant"]
    variables = {"tools": record.get("tools"), "documents": None, **settings}
    conversation = Conversation(messages, variables)
    try:
        if config.learn == "all":
            return conversation.as_learned_text(template, tokenizer)
        return conversation.answers(template, tokenizer, answers if config.learn == "answers" else answers[-1:])
    except UserError as error:
        raise UserError(f"{location}: {error}") from None
    except RecursionError:
        raise UserError(f"{location}: nested too deeply; fix or remove the record") from None


@dataclass
class DialogueCounts:
    """Numbers of dialogues that were used, cut or skipped, and of their tokens."""

    taken: int = 0
    cut: int = 0
    """dialogues that were cut at a row's length"""
    skipped: int = 0
    """dialogues without a learned token, which were skipped"""
    skipped_for_length: int = 0
    """dialogues of ``skipped`` that have a learned token beyond a row's length"""
    tokens: int = 0
    learned: int = 0


def learnable_dialogues(dialogues: Iterable[Dialogue], length: int, count: DialogueCounts) -> Iterator[Dialogue]:
    """Yield the dialogues that can be learned from, cut to ``length`` tokens.

    The first token is never a target, because nothing precedes it.
    """
    for dialogue in dialogues:
        ids, learned = dialogue.ids[:length], dialogue.learned[:length].copy()
        learned[:1] = False
        if not learned.any():
            count.skipped += 1
            count.skipped_for_length += bool(dialogue.learned[1:].any())
            continue
        count.taken += 1
        count.cut += len(dialogue.ids) > length
        count.tokens += len(ids)
        count.learned += int(learned.sum())
        yield Dialogue(ids, learned)


def split(dialogues: Iterable[Dialogue], share: float) -> Iterator[tuple[bool, Dialogue]]:
    """Yield (is_validation, dialogue); validation gets at most ``share`` of the tokens so far."""
    total = validation_tokens = 0
    for dialogue in dialogues:
        total += len(dialogue.ids)
        is_validation = validation_tokens + len(dialogue.ids) <= total * share
        validation_tokens += len(dialogue.ids) if is_validation else 0
        yield is_validation, dialogue


@dataclass
class Packer:
    """Fills rows of ``length`` tokens by best fit: a dialogue goes into the row that it leaves least space in."""

    length: int
    together: bool
    """whether a row may have several dialogues"""
    _open: list[tuple[int, list[Dialogue]]] = field(default_factory=list)
    """free tokens and content of each row"""

    def add(self, dialogue: Dialogue) -> Sequence[Dialogue]:
        """Place a dialogue of at most ``length`` tokens; return the content of a row that is complete, or nothing."""
        size = len(dialogue.ids)
        if not self.together:
            return [dialogue]
        fits = [n for n, (free, _) in enumerate(self._open) if free >= size]
        free, content = self._open.pop(min(fits, key=lambda n: self._open[n][0])) if fits else (self.length, [])
        self._open.append((free - size, [*content, dialogue]))
        if free - size < 2:  # no dialogue with a target is that short
            return self._open.pop()[1]
        if len(self._open) > OPEN:
            return self._open.pop(min(range(len(self._open)), key=lambda n: self._open[n][0]))[1]
        return []

    def rest(self) -> Iterator[Sequence[Dialogue]]:
        """Yield the content of the incomplete rows."""
        for _, content in self._open:
            yield content


def pad_row(content: Sequence[Dialogue], length: int, padding: int) -> Row:
    """Return a row with these dialogues, and the id ``padding`` behind them as one more document."""
    ids, marks = np.full(length, padding, np.uint32), np.zeros(length, np.uint8)
    at = 0
    for dialogue in content:
        end = at + len(dialogue.ids)
        ids[at:end], marks[at:end] = dialogue.ids, np.where(dialogue.learned, LEARNED, 0)
        marks[at] |= START
        at = end
    marks[at : at + 1] |= START
    return ids, marks
