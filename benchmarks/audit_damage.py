"""Damage to what an audit and its censor read: files of questions, and a ledger that several processes spend from."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from pathlib import Path

QUESTION = {
    "name": "one",
    "question": "What is the code of Ann?",
    "options": ["4719", "2210", "9031", "5533"],
    "answer": "4719",
    "parts": [{"ask": "What is the first digit?", "says": ["4", "2", "9", "5"]}, "Is it even?"],
    "paraphrases": ["Ann's code, please"],
}
OTHER = QUESTION | {"name": "two", "question": "What is the code of Bob?", "paraphrases": ["Bob's code, please"]}
JUNK = (None, True, -1, 1e400, "", "   ", "\0", "\ud800", [], {}, [[]], [None], ["x"] * 99, "x" * 5000, {"ask": 1})
"""in the place of any value"""


def refusals(count: int, rng: random.Random) -> tuple[int, int, int]:
    """Of so many damaged files: whole all the same, refused in one line that names the file, anything else."""
    from planaria.common.errors import UserError
    from planaria.swarm.audit.questions import read

    kept = refused = others = 0
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "questions.jsonl"
        for _ in range(count):
            file.write_bytes(_damaged(rng))
            try:
                read(file)
                kept += 1
            except UserError as error:
                fine = str(error).startswith(str(file)) and len(str(error).splitlines()) == 1
                refused, others = refused + fine, others + (not fine)
            except Exception:  # what a damaged file must never come to
                others += 1
    return kept, refused, others


def _damaged(rng: random.Random) -> bytes:
    """A good file with one thing wrong: a byte, a cut, a line twice, or a value of another kind."""
    lines = [json.dumps(QUESTION), json.dumps(OTHER)]
    kind = rng.randrange(5)
    if kind == 0:
        lines[1] = json.dumps(_changed(OTHER, rng))
    if kind == 1:
        lines.append(lines[rng.randrange(2)])
    found = bytearray("\n".join(lines).encode())
    if kind == 2:
        del found[rng.randrange(len(found)) :]
    if kind == 3:
        for _ in range(rng.randint(1, 4)):
            found[rng.randrange(len(found))] = rng.randrange(256)
    if kind == 4:
        place = rng.randrange(len(found))
        found[place:place] = rng.choice((b"{", b"]", b'"', b"\xff", b"\n", b"[" * 3000, b"NaN"))
    return bytes(found)


def _changed(tree: object, rng: random.Random) -> object:
    """One value of it, anywhere, is another."""
    if isinstance(tree, dict) and tree and rng.random() < 0.8:
        key = rng.choice(list(tree))
        return {name: _changed(value, rng) if name == key else value for name, value in tree.items()}
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        place = rng.randrange(len(tree))
        return [_changed(value, rng) if n == place else value for n, value in enumerate(tree)]
    return rng.choice(JUNK)


def together(processes: int, tries: int, cost: float = 0.01) -> float:
    """What a budget of 1 nat has given away when so many processes have tried to spend from it."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "ledger.json"
        granted = fork.Value("i", 0)
        running = [fork.Process(target=_spend, args=(file, cost, tries, granted)) for _ in range(processes)]
        for process in running:
            process.start()
        for process in running:
            process.join()
        from planaria.swarm.audit.censor import Ledger

        noted = Ledger(file, 1.0).spent("q")
        assert abs(noted - granted.value * cost) < 1e-6, (noted, granted.value)
        return granted.value * cost


def _spend(file: Path, cost: float, tries: int, granted: object) -> None:
    from planaria.swarm.audit.censor import Ledger

    ledger = Ledger(file, 1.0)
    for _ in range(tries):
        if ledger.spend({"q": cost}):
            with granted.get_lock():  # type: ignore[attr-defined]
                granted.value += 1  # type: ignore[attr-defined]


def killed(seed: int) -> int:
    """Replies that a process told of, before it was killed, and that its ledger does not know; at most one more is."""
    from planaria.swarm.audit.censor import Ledger

    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "ledger.json"
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            os.close(reads)
            ledger = Ledger(file, 1e9)
            while ledger.spend({"q": 1.0}):
                os.write(writes, b".")
        os.close(writes)
        os.read(reads, 1)
        time.sleep(0.02 + 0.01 * random.Random(seed).random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = 1
        while some := os.read(reads, 1 << 16):
            told += len(some)
        os.close(reads)
        noted = round(Ledger(file, 1e9).spent("q"))
        assert noted <= told + 1, (noted, told)
        return told - noted
