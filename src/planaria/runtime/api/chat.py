"""A conversation with a trained model on a terminal or a pipe. Each input line is a message that gets an answer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from planaria.common.errors import UserError
from planaria.models.chat import Turn
from planaria.models.generate import texts
from planaria.models.sampling import Sampling
from planaria.runtime.api.completer import Completer

TOKENS = 512
"""default maximum of an answer's tokens"""
PROMPT = "> "
_KEPT = 4
"""the oldest turns are dropped if less than 1 / ``_KEPT`` of the context is left for an answer"""
Note = Callable[[str], object]


class Chat:
    """A conversation: each answer is drawn after all turns, rendered by the model's chat template."""

    def __init__(self, model: Completer, draws: Sampling, note: Note) -> None:
        """``draws`` are those of each answer; ``note`` receives lines about answers and turns that were cut.

        :raises UserError: if the model has no chat template, or ``draws`` are invalid.
        """
        if model.template is None:
            raise UserError(
                f"{model.place}: --chat: the model has no chat template (chat_template.jinja, tokenizer_config.json); "
                "use an instruct model or a run that started from one, or use --prompt"
            )
        draws.check()
        self._model, self._draws, self._note, self._template = model, draws, note, model.template
        self._turns: list[Turn] = []
        end = self._template.end(model.tokenizer)
        self._stops = {model.tokenizer.end, *model.ends} | (set() if end is None else {end})

    def answer(self, message: str) -> Iterator[str]:
        """Yield the answer to a message piece by piece; when it is complete, both become turns.

        :raises UserError: if the message alone fills the context, or the template fails.
        """
        self._turns, ids = self._fit_to_context([*self._turns, ("user", message)])
        most = min(self._draws.max_new, self._model.context - len(ids))
        drawn = self._draws._replace(max_new=most, seed=self._draws.seed + len(self._turns))
        new, pieces = list[int](), list[str]()
        for piece in texts(_recorded(self._model.generate(ids, drawn, self._stops), new), self._model.tokenizer.decode):
            pieces.append(piece)
            yield piece
        if len(new) == most:
            self._note(f"the answer was cut after {most} tokens (--tokens {self._draws.max_new}, context "
                       f"{self._model.context})")  # fmt: skip
        self._turns.append(("assistant", "".join(pieces)))

    def forget(self) -> None:
        """Remove a message that was not answered."""
        if self._turns and self._turns[-1][0] == "user":
            self._turns.pop()

    def _fit_to_context(self, turns: list[Turn]) -> tuple[list[Turn], list[int]]:
        """Return the newest turns that leave room for an answer, and their ids."""
        context, dropped = self._model.context, 0
        room = min(self._draws.max_new, context // _KEPT)
        ids = self._template.ids(turns, self._model.tokenizer)
        while len(ids) + room > context and len(turns) > 1:
            turns, dropped = turns[2:], dropped + 2
            ids = self._template.ids(turns, self._model.tokenizer)
        if len(ids) >= context:
            raise UserError(f"chat: the message has {len(ids)} tokens, the model reads {context}; shorten it")
        if dropped:
            self._note(f"the oldest {dropped} turns no longer fit the context of {context} tokens and were dropped")
        return turns, ids


def _recorded(tokens: Iterator[int], seen: list[int]) -> Iterator[int]:
    for token in tokens:
        seen.append(token)
        yield token


def converse(source: Path, draws: Sampling, note: Note) -> int:
    """Answer the lines of standard input until it ends; return the exit code.

    On a terminal Ctrl-C stops an answer, Ctrl-D leaves, and a message that cannot be answered is reported.

    :raises UserError: if the model has no chat template, or a message from a pipe cannot be answered.
    """
    chat, typed = Chat(Completer(source), draws, note), sys.stdin.isatty()
    for message in _terminal_lines() if typed else _pipe_lines():
        try:
            for piece in chat.answer(message):
                print(piece, end="", flush=True)
        except (UserError, KeyboardInterrupt) as error:
            if not typed:
                raise
            chat.forget()
            if isinstance(error, UserError):
                note(str(error))
        print(flush=True)
    return 0


def _terminal_lines() -> Iterator[str]:
    """Yield lines from the terminal, with editing and history where the platform has readline."""
    with contextlib.suppress(ImportError):
        import_module("readline")  # input() uses it
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print()
            return
        if line.strip():
            yield line


def _pipe_lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            if line.strip():
                yield line.rstrip("\r\n")
    except UnicodeDecodeError:
        raise UserError("chat: standard input is not UTF-8 text; convert it") from None
