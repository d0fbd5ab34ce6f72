"""Chat templates: the ids of a conversation as a model was trained to read it, whatever its turns say.

A template is Jinja that comes with the weights. It is rendered in a child process with bounded memory and time, and
the text is encoded as a whole. Control tokens are the template's alone: no question can end its turn.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from planaria.common import apart, documents
from planaria.common.errors import UserError
from planaria.data.tokenizer import Tokenizer
from planaria.models.gguf_file import look

Role = Literal["system", "user", "assistant"]
Turn = tuple[Role, str]
FILE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
MOST = 1 << 18
"""characters of a template, and of what it makes of a conversation of placeholders"""
MEMORY, SECONDS = 256 << 20, 20.0
"""bytes and seconds that it takes to render a conversation, at most"""
_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True)
class Template:
    """A chat template, and where it is from."""

    place: Path
    text: str
    names: tuple[tuple[str, str], ...] = ()
    """special tokens by the names that the template has for them, such as ("bos_token", "<s>")"""

    def ids(self, turns: Sequence[Turn], tokenizer: Tokenizer, reply: str = "") -> list[int]:
        """The ids of a conversation in which the assistant speaks next, and of how its ``reply`` begins.

        The rendered text is encoded as a whole. Names of control tokens in a turn or the reply are plain text.

        :raises UserError: when the template fails, or leaves a turn out.
        """
        self._parts(tuple(role for role, _ in turns))  # which tells whether all turns are in it
        mark, names = _unused("".join([*(content for _, content in turns), reply])), tuple(tokenizer.control)
        guarded = [(role, _guarded(content, names, mark)) for role, content in turns]
        return tokenizer.encode_marked(self._rendered(guarded) + _guarded(reply, names, mark), mark)

    def takes_system(self) -> bool:
        """Whether a conversation may begin with an instruction of its own: some templates refuse that."""
        try:
            self._parts(("system", "user"))
        except UserError:
            return False
        return True

    def end(self, tokenizer: Tokenizer) -> int | None:
        """The control token that closes the assistant's turns; None where it is no single token."""
        after = tokenizer.encode_marked(self._parts(("user", "assistant", "user"))[2])
        return after[0] if after and tokenizer.is_control(after[0]) else None

    @functools.lru_cache(maxsize=8)  # noqa: B019 (templates are few and live as long as their policies)
    def _parts(self, roles: tuple[Role, ...]) -> list[str]:
        """The text before, between and after turns of placeholders."""
        slots = [f"planaria{number}slot" for number in range(len(roles))]
        rest, parts = self._rendered(list(zip(roles, slots, strict=True))), []
        for slot in slots:
            once = rest.count(slot) == 1
            part, _, rest = rest.partition(slot)
            if not once or len(part) > MOST:
                fix = "fix it, or write policy.chat = 'never'"
                raise UserError(f"{self.place}: its chat template leaves out what is asked, or repeats it; {fix}")
            parts.append(part)
        return [*parts, rest]

    def _rendered(self, turns: Sequence[Turn]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        asked = {"template": self.text, "values": dict(self.names) | values}
        fix = "write policy.chat = 'never'"
        try:
            return _renderer().call(json.dumps(asked).encode(), SECONDS, "the template", fix).decode()
        except UserError as error:
            _stop_renderer()
            reason = str(error).removesuffix(f"; {fix}")
            raise UserError(f"{self.place}: its chat template fails ({reason}); {fix}") from None


_RENDERERS: dict[int, apart.Child] = {}
"""by process: one that is forked must not share its parent's"""


def _renderer() -> apart.Child:
    """The child process of this process in which templates are rendered."""
    if (here := os.getpid()) not in _RENDERERS:
        _RENDERERS[here] = apart.Child("planaria.models.chat_template:rendered", MEMORY)
    return _RENDERERS[here]


def _stop_renderer() -> None:
    if (child := _RENDERERS.pop(os.getpid(), None)) is not None:
        child.close()


def _unused(text: str) -> str:
    """A private character that is not in a text."""
    return next(letter for letter in map(chr, range(0xF0000, 0xFFFFE)) if letter not in text)


@functools.lru_cache(maxsize=4)
def _somewhere(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(f"(?=(?:{'|'.join(map(re.escape, names))}))")


def _guarded(content: str, names: tuple[str, ...], mark: str) -> str:
    """A turn's text with ``mark`` before each name in it, and where it could complete one with the text around it."""
    if not names:
        return content
    core = content.strip()
    begins = any(core.startswith(name[cut:]) for name in names for cut in range(1, len(name)))
    cuts = {len(core) - cut for name in names for cut in range(1, len(name)) if core.endswith(name[:cut])}
    cuts |= {found.start() for found in _somewhere(names).finditer(core)} | ({0} if begins else set())
    edges = [0, *sorted(cuts), len(core)]
    parts = [core[start:stop] for start, stop in itertools.pairwise(edges)]
    before, _, after = content.partition(core) if core else (content, "", "")
    return before + mark.join(parts) + after


def template_of(place: Path) -> Template | None:
    """The chat template that comes with a Hugging Face folder or a GGUF file; None where there is none.

    :raises UserError: when the files that should hold it are damaged.
    """
    return _in_folder(place) if place.is_dir() else _in_gguf(place)


def _in_folder(folder: Path) -> Template | None:
    settings, mend = folder / SETTINGS, "download it again"
    found = documents.parse_json(documents.data(settings, mend=mend), settings, mend) if settings.is_file() else {}
    known: Mapping[str, Any] = found if isinstance(found, dict) else {}
    text, place = known.get("chat_template"), settings
    if isinstance(text, list):  # several by name
        text = next(
            (each.get("template") for each in text if isinstance(each, dict) and each.get("name") == "default"), None
        )
    if (alone := folder / FILE).is_file():
        text, place = documents.data(alone, mend=mend).decode("utf-8", "replace"), alone
    return _made(place, text, {name: _name(known.get(name)) for name in _TOKENS})


def _in_gguf(file: Path) -> Template | None:
    found = look(file).values
    tokens = found.get("tokenizer.ggml.tokens", [])

    def name(kind: str) -> str:
        number = found.get(f"tokenizer.ggml.{kind}_token_id")
        return str(tokens[number]) if isinstance(number, int) and 0 <= number < len(tokens) else ""

    return _made(file, found.get("tokenizer.chat_template"), {f"{kind}_token": name(kind) for kind in ("bos", "eos")})


def _made(place: Path, text: object, names: Mapping[str, str]) -> Template | None:
    if not isinstance(text, str) or not text.strip():
        return None
    if len(text) > MOST:
        raise UserError(f"{place}: a chat template of {len(text)} characters, of at most {MOST}; remove it")
    known = {name: token for name, token in names.items() if token or name in ("bos_token", "eos_token")}
    return Template(place, text, tuple(known.items()))


def _name(token: object) -> str:
    """A token's name: some files wrap it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
