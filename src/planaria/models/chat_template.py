"""Render a chat template as ``transformers`` does. Runs in a child process: a template is untrusted code.

The environment has the filters, functions and tags that templates use. The date is fixed, so that all peers of a swarm
render a conversation alike.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from planaria.common.errors import UserError

DATE = datetime(2024, 7, 26)
"""the date of ``strftime_now``: the one that Llama 3's template writes without a clock"""
MOST = 1 << 22
"""maximum number of characters that a template may produce"""


def rendered(argument: bytes) -> bytes:
    """Take {"template", "values", "around"} as JSON; return the list of texts for each of ``values``, as JSON.

    ``around``: two texts, put before and after what is within ``{% generation %}`` tags.

    :raises UserError: with the reason, if rendering fails.
    """
    request = json.loads(argument)
    try:
        template = _compiled(request["template"])
        _Generation.around = tuple(request.get("around", ("", "")))
        texts = [str(template.render(**values)) for values in request["values"]]
    except MemoryError:
        raise UserError("it needs too much memory") from None
    except (
        TemplateError,
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        RecursionError,
        AttributeError,
    ) as error:
        raise UserError(" ".join(str(error).split()) or type(error).__name__) from None
    if (length := max(map(len, texts), default=0)) > MOST:
        raise UserError(f"it makes {length} characters, of at most {MOST}")
    return json.dumps(texts).encode()


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _refuse, "strftime_now": DATE.strftime, "dict": _Dict(), "namespace": _Names}
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``tojson`` without jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)


class _Dict:
    """``dict`` for templates, without the type's other attributes."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


class _Names(Namespace):
    """``namespace`` for templates, without private attributes."""

    def __init__(*args: Any, **named: Any) -> None:
        own, *values = args
        Namespace.__init__(own, _allowed(dict(*values, **named)))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, _allowed({name: value})[name])


def _allowed(named: dict[str, Any]) -> dict[str, Any]:
    if hidden := [name for name in named if str(name).startswith("_")]:
        raise SecurityError(f"a namespace has no attribute {hidden[0]!r}")
    return named


class _Generation(Extension):
    """The tag around an assistant's turn, which marks it for training; it renders its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)
    around: tuple[str, ...] = ("", "")
    """put before and after the content"""

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Any) -> str:
        before, after = self.around
        return f"{before}{caller()}{after}"
