"""Chat templates: conversations as the token ids a model was trained on.

A template is Jinja that comes with the weights. It is rendered in a child process with bounded memory and time, and
the text is encoded as a whole. Only the template can produce control tokens: text of a turn cannot end the turn.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from planaria.common import child_process, documents
from planaria.common.errors import UserError
from planaria.data.records import without_surrogates
from planaria.data.tokenizer import Tokenizer
from planaria.models.gguf_file import read_metadata
from planaria.models.model_metadata import ModelMetadata, metadata_of_folder, metadata_of_gguf

Role = Literal["system", "user", "assistant"]
Turn = tuple[Role, str]
FIX = "fix it, or remove it (`generate --prompt`, policy.chat = 'never')"
MAX_TEMPLATE_CHARS = 1 << 18
"""maximum characters of a template, and of its rendering of placeholder turns"""
MEMORY, SECONDS = 256 << 20, 20.0
"""limits of rendering a conversation, in bytes and seconds"""
_TAG = re.compile(r"\{%[-+]?\s*generation\b")
_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_ALWAYS = ("bos_token", "eos_token")
"""template variables that are defined, if empty, for every model"""


@dataclass(frozen=True)
class Template:
    """A chat template and the model it belongs to."""

    path: Path
    text: str
    names: tuple[tuple[str, str], ...] = ()
    """template variables for special tokens, such as ("bos_token", "<s>")"""

    def ids(self, turns: Sequence[Turn], tokenizer: Tokenizer, reply: str = "") -> list[int]:
        """Return the ids of a conversation up to the assistant's next turn, and of its ``reply`` so far.

        Names of control tokens in a turn or the reply are encoded as plain text.

        :raises UserError: if the template fails or omits a turn.
        """
        self._parts(tuple(role for role, _ in turns))  # checks that the template renders every turn
        names = tuple(tokenizer.control_tokens)
        (mark,) = _unused_characters("".join([*(content for _, content in turns), reply]))
        guarded = [(role, _guard_text(content, names, mark)) for role, content in turns]
        return tokenizer.encode_marked(self._render(guarded) + _guard_text(reply, names, mark), mark)

    def takes_system(self) -> bool:
        """Return whether the template supports a system turn."""
        try:
            self._parts(("system", "user"))
        except UserError:
            return False
        return True

    def end(self, tokenizer: Tokenizer) -> int | None:
        """Return the control token that closes the assistant's turns, or None if that is not a single token."""
        after = tokenizer.encode_marked(self._parts(("user", "assistant", "user"))[2])
        return after[0] if after and tokenizer.is_control(after[0]) else None

    @functools.lru_cache(maxsize=8)  # noqa: B019 (templates are few and live as long as their policies)
    def _parts(self, roles: tuple[Role, ...]) -> list[str]:
        """Return the text before, between and after placeholder turns."""
        slots = [f"planaria{number}slot" for number in range(len(roles))]
        rest, pieces = self._render(list(zip(roles, slots, strict=True))), []
        for slot in slots:
            once = rest.count(slot) == 1
            before, _, rest = rest.partition(slot)
            if not once or len(before) > MAX_TEMPLATE_CHARS:
                raise UserError(f"{self.path}: its chat template omits or repeats a turn; {FIX}")
            pieces.append(before)
        return [*pieces, rest]

    def _render(self, turns: Sequence[Turn]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        (text,) = self.render([values], FIX)
        return text

    @property
    def tags_answers(self) -> bool:
        """Whether answers are within ``{% generation %}`` tags."""
        return _TAG.search(self.text) is not None

    def render(self, several: Sequence[Mapping[str, Any]], fix: str, around: tuple[str, str] = ("", "")) -> list[str]:
        """Return the text for each of ``several`` sets of values; ``around``: put before and after each tagged answer.

        :raises UserError: with ``fix``, if the template fails.
        """
        texts: list[str] = self._call(several, fix, around=around)
        return texts

    def answers(
        self, values: Mapping[str, Any], numbers: Sequence[int], fix: str
    ) -> tuple[str, list[tuple[int, int] | None]]:
        """Return the text of a dialogue, and where the messages ``numbers`` start and stop in it.

        A message is what it adds to the text before it. Its place is None if the template renders it, or an earlier
        message, differently when it is the last.

        :raises UserError: with ``fix``, if the template fails.
        """
        full, spans = self._call([values], fix, answers=numbers)
        while len(spans) < len(numbers):
            spans += self._call([values], fix, answers=numbers[len(spans) :])[1]
        return full, spans

    def _call(self, several: Sequence[Mapping[str, Any]], fix: str, **request: Any) -> Any:
        values = [{**dict(self.names), **each} for each in several]
        request |= {"template": self.text, "values": values}
        try:
            return json.loads(_renderer().call(json.dumps(request).encode(), SECONDS, "the template", fix))
        except UserError as error:
            _stop_renderer()
            reason = str(error).removesuffix(f"; {fix}")
            raise UserError(f"{self.path}: its chat template fails ({reason}); {fix}") from None


class DialogueSegments(NamedTuple):
    """The parts of a dialogue's text, each with whether it is learned.

    Names after the character ``mark`` are plain text (:meth:`planaria.data.tokenizer.Tokenizer.encode_marked`).
    """

    parts: list[tuple[str, bool]]
    mark: str


@dataclass(frozen=True)
class Conversation:
    """A dialogue with all that its template gets, or several plain texts."""

    content: Sequence[Any]
    """messages, or texts"""
    values: Mapping[str, Any] = field(default_factory=dict)
    """the template's other values"""

    def guard(self, tokenizer: Tokenizer) -> tuple[Conversation, str]:
        """Return the conversation with guarded texts, which cannot name a control token, and the guarding character."""
        mark = self._unused[0]
        names = tuple(tokenizer.control_tokens)
        content, values = _guard_value([self.content, self.values], names, mark)
        return Conversation(content, values), mark

    def as_learned_text(self, template: Template, tokenizer: Tokenizer) -> DialogueSegments:
        """Return the text, all of which is learned; UserError if the template fails."""
        own, mark = self.guard(tokenizer)
        return DialogueSegments([(own._render(template), True)], mark)

    def answers(self, template: Template, tokenizer: Tokenizer, wanted: Sequence[int]) -> DialogueSegments:
        """Return the text, of which the messages ``wanted`` are learned.

        :raises UserError: if the template fails, or changes earlier messages when later ones follow.
        """
        own, mark = self.guard(tokenizer)
        split = own._split_by_tags if template.tags_answers else own._split_by_prefixes
        return DialogueSegments(split(template, wanted), mark)

    def _split_by_prefixes(self, template: Template, wanted: Sequence[int]) -> list[tuple[str, bool]]:
        """Return the text in parts; an answer is what it adds to the text before it."""
        segments: list[tuple[str, bool]] = []
        at = 0
        full, spans = template.answers(self._values, wanted, _FIX)
        for number, span in zip(wanted, spans, strict=True):
            if span is None:
                raise UserError(
                    f"messages[{number}]: the chat template of {template.path} renders it differently when messages "
                    "follow; set data.learn = 'last', or use a data.template with {% generation %} tags"
                )
            start, stop = span
            segments += [(full[at:start], False), (full[start:stop], True)]
            at = stop
        return [*segments, (full[at:], False)]

    def _split_by_tags(self, template: Template, wanted: Sequence[int]) -> list[tuple[str, bool]]:
        """Return the text in parts, by the template's tags."""
        _, start, stop = self._unused  # the first may be the mark
        full = self._render(template, (start, stop))
        pieces = full.split(start)
        roles = [number for number, message in enumerate(self.content) if message["role"] == "assistant"]
        if len(pieces) - 1 != len(roles):
            raise UserError(
                f"the chat template of {template.path} tags {len(pieces) - 1} answers of {len(roles)}; fix its "
                "{% generation %} tags, or set data.template"
            )
        segments = [(pieces[0], False)]
        for number, piece in zip(roles, pieces[1:], strict=True):
            answer, _, rest = piece.partition(stop)
            segments += [(answer, number in wanted), (rest, False)]
        return segments

    def _render(self, template: Template, around: tuple[str, str] = ("", "")) -> str:
        (text,) = template.render([self._values], _FIX, around)
        return text

    @property
    def _values(self) -> dict[str, Any]:
        return {**self.values, "messages": self.content, "add_generation_prompt": False}

    @property
    def _unused(self) -> list[str]:
        """Three private-use characters that no text contains."""
        return _unused_characters(json.dumps([self.content, self.values], ensure_ascii=False, default=str), 3)


def read_template(file: Path, names: tuple[tuple[str, str], ...]) -> Template:
    """Return the template in a Jinja file, with these ``names`` of special tokens; UserError if it cannot be read."""
    text = documents.read_bytes(file, fix="use a Jinja file").decode("utf-8", "replace")
    template = _build_template(file, text, dict(names))
    if template is None:
        raise UserError(f"{file}: an empty chat template; use another")
    return template


_FIX = "fix the record, or set data.template"
_RENDERERS: dict[int, child_process.Child] = {}
"""renderer of each process id: a forked process must not share its parent's renderer"""


def _renderer() -> child_process.Child:
    if (pid := os.getpid()) not in _RENDERERS:
        _RENDERERS[pid] = child_process.Child("planaria.models.chat_template:render_request", MEMORY)
    return _RENDERERS[pid]


def _stop_renderer() -> None:
    if (child := _RENDERERS.pop(os.getpid(), None)) is not None:
        child.close()


def _unused_characters(text: str, count: int = 1) -> list[str]:
    """Return private-use characters that a text does not contain."""
    return list(itertools.islice((letter for letter in map(chr, range(0xF0000, 0xFFFFE)) if letter not in text), count))


def _guard_value(value: Any, names: tuple[str, ...], mark: str) -> Any:
    """Return a JSON value in which all texts are guarded, except roles and keys that are identifiers. Values that JSON
    lacks, such as dates of a Parquet file, become texts."""
    if isinstance(value, Mapping):
        return {
            key if key.isidentifier() else _guard_value(key, names, mark): inner
            if key == "role"
            else _guard_value(inner, names, mark)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_guard_value(inner, names, mark) for inner in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _guard_text(without_surrogates(str(value)), names, mark)


@functools.lru_cache(maxsize=4)
def _pattern_of_names(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(f"(?=(?:{'|'.join(map(re.escape, names))}))")


def _guard_text(content: str, names: tuple[str, ...], mark: str) -> str:
    """Insert ``mark`` before each control token's name in a turn, and where one could form across its edges."""
    if not names:
        return content
    core = content.strip()
    begins = any(core.startswith(name[cut:]) for name in names for cut in range(1, len(name)))
    cuts = {len(core) - cut for name in names for cut in range(1, len(name)) if core.endswith(name[:cut])}
    cuts |= {match.start() for match in _pattern_of_names(names).finditer(core)} | ({0} if begins else set())
    edges = [0, *sorted(cuts), len(core)]
    pieces = [core[start:stop] for start, stop in itertools.pairwise(edges)]
    before, _, after = content.partition(core) if core else (content, "", "")
    return before + mark.join(pieces) + after


def template_of(path: Path) -> Template | None:
    """Return the chat template of a Hugging Face folder or a GGUF file, if any. UserError if its files are damaged."""
    metadata = metadata_of_folder(path, {}, 0) if path.is_dir() else metadata_of_gguf(read_metadata(path).values, 0)
    return template_in(metadata, path)


def template_in(metadata: ModelMetadata | None, path: Path) -> Template | None:
    """Return the chat template among the settings of the model at ``path``, or None if it has none.

    :raises UserError: if the template is too large.
    """
    if metadata is None:
        return None
    text = metadata.template or metadata.tokenizer.get("chat_template")
    if isinstance(text, list):  # several templates by name
        text = next(
            (each.get("template") for each in text if isinstance(each, dict) and each.get("name") == "default"), None
        )
    return _build_template(path, text, {name: _token_name(metadata.tokenizer.get(name)) for name in _TOKENS})


def _build_template(path: Path, text: object, names: Mapping[str, str]) -> Template | None:
    if not isinstance(text, str) or not text.strip():
        return None
    if len(text) > MAX_TEMPLATE_CHARS:
        raise UserError(
            f"{path}: the chat template has {len(text)} characters; the limit is {MAX_TEMPLATE_CHARS}; remove it"
        )
    return Template(path, text, tuple((name, token) for name, token in names.items() if token or name in _ALWAYS))


def _token_name(token: object) -> str:
    """Return a token's name, which some files wrap in an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
