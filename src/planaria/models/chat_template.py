"""Render a chat template as ``transformers`` does. Runs in a child process: a template is untrusted code.

The environment has the filters, functions and tags that templates use. The date is fixed, so that all peers of a swarm
render a conversation alike.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
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
MAX_OUTPUT_CHARS = 1 << 22
"""maximum number of characters that a template may produce"""
_AT_ONCE = 1 << 22
"""characters of a dialogue's beginnings that one call renders, or more if one is longer"""
_SIMPLE = ("first", "index", "index0", "previtem")
"""attributes of a loop that do not depend on later items"""
_STATE = (nodes.NSRef, nodes.Break, nodes.Continue, nodes.Block, nodes.Include, nodes.Import, nodes.FromImport)
_STATEFUL = ("loop", "namespace", "cycler", "joiner")
"""what may carry state from one pass of a loop to the next, or end it"""
_MARK = "planaria_mark"
TextSpan = tuple[int, int] | None
"""start and stop of a message in a text"""


def render_request(argument: bytes) -> bytes:
    """Take {"template", "values", "around"} as JSON; return the list of texts for each of ``values``, as JSON.

    ``around``: two texts, put before and after what is within ``{% generation %}`` tags. With "answers", the numbers of
    messages in the only ``values``, return its text and the result of :func:`_spans`.

    :raises UserError: with the reason, if rendering fails.
    """
    request = json.loads(argument)
    try:
        template = _compile(request["template"])
        _Generation.around = tuple(request.get("around", ("", "")))
        texts: list[Any] = [str(template.render(**values)) for values in request["values"]]
        if "answers" in request:
            texts.append(_spans(request["template"], texts[0], request["values"][0], request["answers"]))
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
    if (length := max((len(text) for text in texts if isinstance(text, str)), default=0)) > MAX_OUTPUT_CHARS:
        raise UserError(f"it renders {length} characters; the limit is {MAX_OUTPUT_CHARS}")
    return json.dumps(texts).encode()


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    return _environment().from_string(template)


def _spans(source: str, full: str, values: Mapping[str, Any], answers: Sequence[int]) -> list[TextSpan]:
    """Return the span of each answer in a dialogue's text ``full``.

    An answer is what it adds to the text of the messages before it. Its span is None if the template renders it, or an
    earlier message, differently when it is the last. The list ends early if that takes many renderings.
    """
    characters, in_order = 0, list[TextSpan]()

    def by_prefixes(number: int) -> TextSpan:
        nonlocal characters
        template, messages = _compile(source), values["messages"]
        before = str(template.render(**{**values, "messages": messages[:number], "add_generation_prompt": True}))
        after = str(template.render(**{**values, "messages": messages[: number + 1]}))
        characters += len(before) + len(after)
        return (len(before), len(after)) if full.startswith(after) and after.startswith(before) else None

    spans = _spans_by_marks(source, full, values, answers) if len(answers) > 2 else {}
    if any(spans[number] != by_prefixes(number) for number in (*answers[:1], *answers[-1:]) if number in spans):
        spans = {}
    characters = 0
    for number in answers:
        if number not in spans and characters > _AT_ONCE:
            break
        in_order.append(spans[number] if number in spans else by_prefixes(number))
    return in_order


def _spans_by_marks(source: str, full: str, values: Mapping[str, Any], answers: Sequence[int]) -> dict[int, TextSpan]:
    """Return the spans by number, from two renderings; empty unless the template writes messages one by one."""
    marked, required = _mark_messages(source)
    if marked is None:
        return {}
    mark = next(letter for letter in map(chr, range(0xF0000, 0xFFFFE)) if letter not in full)
    asking = {**values, "messages": values["messages"][: answers[-1]], "add_generation_prompt": True}
    (*texts, end), (*others, prompt) = (str(marked.render(**{**v, _MARK: mark})).split(mark) for v in (values, asking))
    if texts[: len(others)] != others or len(texts) != len(values["messages"]) + 1:
        return {}
    edges = list(itertools.accumulate(map(len, texts)))
    return {
        number: (edges[number] + len(prompt), edges[number + 1] + len(end))
        if full.startswith(end, edges[number + 1]) and (texts[number + 1] + end).startswith(prompt)
        else None
        for number in answers
        if number >= required
    }


@functools.lru_cache(maxsize=16)
def _mark_messages(source: str) -> tuple[Any, int]:
    """Return a template with a mark before each message and after the last one, and the number of messages that
    it requires. The template is None if the text of a message may depend on later ones, or on more than the messages.
    """
    tree = _environment().parse(source)
    sets = [(node.target, node.node) for node in tree.body if isinstance(node, nodes.Assign)]
    copies = [(copy, node) for copy, node in sets if isinstance(copy, nodes.Name) and _is_name(node, "messages")]
    names = ("messages", *(copy.name for copy, _ in copies))
    loops = [node for node in tree.body if isinstance(node, nodes.For) and _is_name(node.iter, *names)]
    picked = [(node.node, node.arg.value) for node in tree.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)]
    indexed = [(node, index) for node, index in picked if isinstance(index, int) and _is_name(node, *names)]
    allowed = [
        *(loop.iter for loop in loops),
        *(each for copied in copies for each in copied),
        *(node for node, _ in indexed),
        *(node.node for node in tree.find_all(nodes.Getattr) if node.attr in _SIMPLE),
    ]
    used = [node for node in tree.find_all(nodes.Name) if node.name in (*names, *_STATEFUL)]
    if len(loops) != 1 or loops[0].test or loops[0].else_ or loops[0].recursive or any(tree.find_all(_STATE)):
        return None, 0
    if not set(map(id, used)) <= set(map(id, allowed)):
        return None, 0
    mark = nodes.Output([nodes.Name(_MARK, "load")])
    loops[0].body.insert(0, mark)
    tree.body.insert(tree.body.index(loops[0]) + 1, mark)
    return _environment().from_string(tree), max((index + 1 for _, index in indexed), default=0)


def _is_name(node: nodes.Node, *names: str) -> bool:
    return isinstance(node, nodes.Name) and node.name in names


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": DATE.strftime,
        "dict": _Dict(),
        "namespace": _Names,
    }
    return environment


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
        Namespace.__init__(own, _require_public(dict(*values, **named)))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, _require_public({name: value})[name])


def _require_public(named: dict[str, Any]) -> dict[str, Any]:
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
        return nodes.CallBlock(self.call_method("_wrap"), [], [], body).set_lineno(line)

    def _wrap(self, caller: Any) -> str:
        before, after = self.around
        return f"{before}{caller()}{after}"
