"""Chat templates: the ids of a conversation as a model was trained to read it, whatever its turns say.

A template is Jinja that comes with the weights. It is laid out with a placeholder for each turn's text. What stands
between them is read with its control tokens; each turn's text is read by itself, as plain letters. So no question can
end its turn and speak in another's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from planaria import documents
from planaria.data.tokenizer import Tokenizer
from planaria.errors import UserError
from planaria.model.gguf_file import look

Role = Literal["system", "user", "assistant"]
Turn = tuple[Role, str]
FILE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
MOST = 1 << 18
"""characters of a template, and of what it makes of a conversation of placeholders"""


@dataclass(frozen=True)
class Template:
    """A chat template, and where it is from."""

    place: Path
    text: str
    bos: str = ""
    """the name of the token that begins a text, if it has one"""
    eos: str = ""

    def ids(self, turns: Sequence[Turn], tokenizer: Tokenizer) -> list[int]:
        """The ids of a conversation in which the assistant speaks next.

        :raises UserError: when the template fails, or leaves a turn out.
        """
        first, *others = self._parts(tuple(role for role, _ in turns))
        found = tokenizer.encode_marked(first)
        for (_, text), part in zip(turns, others, strict=True):
            found += tokenizer.encode(text) + tokenizer.encode_marked(part)
        return found

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
        """What stands before, between and behind the turns' texts."""
        slots = [f"planaria{number}slot" for number in range(len(roles))]
        turns = [{"role": role, "content": slot} for role, slot in zip(roles, slots, strict=True)]
        try:
            rest = (
                _environment()
                .from_string(self.text)
                .render(messages=turns, add_generation_prompt=True, bos_token=self.bos, eos_token=self.eos, tools=None)
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{self.place}: its chat template fails ({reason}); write policy.chat = 'never'") from error
        parts = []
        for slot in slots:
            once = rest.count(slot) == 1
            part, _, rest = rest.partition(slot)
            if not once or len(part) > MOST:
                mend = "mend it, or write policy.chat = 'never'"
                raise UserError(f"{self.place}: its chat template leaves out what is asked, or repeats it; {mend}")
            parts.append(part)
        return [*parts, rest]


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
        text = next((each.get("template") for each in text if each.get("name") == "default"), None)
    if (alone := folder / FILE).is_file():
        text, place = documents.data(alone, mend=mend).decode("utf-8", "replace"), alone
    return _made(place, text, _name(known.get("bos_token")), _name(known.get("eos_token")))


def _in_gguf(file: Path) -> Template | None:
    found = look(file).values
    tokens = found.get("tokenizer.ggml.tokens", [])

    def name(kind: str) -> str:
        number = found.get(f"tokenizer.ggml.{kind}_token_id")
        return str(tokens[number]) if isinstance(number, int) and 0 <= number < len(tokens) else ""

    return _made(file, found.get("tokenizer.chat_template"), name("bos"), name("eos"))


def _made(place: Path, text: object, bos: str, eos: str) -> Template | None:
    if not isinstance(text, str) or not text.strip():
        return None
    if len(text) > MOST:
        raise UserError(f"{place}: a chat template of {len(text)} characters, of at most {MOST}; remove it")
    return Template(place, text, bos, eos)


def _name(token: object) -> str:
    """A token's name: some files wrap it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """What templates are written for: they cannot reach Python, and refuse conversations in words of their own."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    # No clock (strftime_now): templates then write a date of their own, and a prompt is the same on every day.
    made.globals["raise_exception"] = _refuse
    return made


class _Generation(Extension):
    """The tag around what an assistant says, which some templates have for those who train on it: its body alone."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)
