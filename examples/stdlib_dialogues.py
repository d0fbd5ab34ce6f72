"""Dialogues for `planaria train smollm2_sft`: what functions of Python's standard library do, from their docstrings.

    python examples/stdlib_dialogues.py dialogues.jsonl

The text is that of the running Python, so no network is needed.
"""

import importlib
import inspect
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "ast bisect calendar colorsys copy csv datetime difflib email.utils fnmatch functools glob gzip heapq hmac html "
    "importlib.util inspect io itertools json locale logging math operator os.path pathlib pickle platform pprint "
    "random re secrets shlex shutil socket statistics string struct subprocess tempfile textwrap time tokenize "
    "traceback types urllib.parse uuid warnings weakref zlib"
)
QUESTIONS = ("What does {} do?", "What is {} for?", "Explain {} in one sentence.")
MOST = 100
"""maximum characters of an answer"""


def facts() -> Iterator[tuple[str, str]]:
    """Yield the name of each documented public function, and the first sentence of its docstring."""
    for module in MODULES.split():
        for name, item in sorted(vars(importlib.import_module(module)).items()):
            own = getattr(item, "__module__", "") in (module, f"_{module}", None)
            if name.startswith("_") or not inspect.isroutine(item) or not own:
                continue
            sentence = " ".join((inspect.getdoc(item) or "").partition("\n\n")[0].split())
            if 20 <= len(sentence) <= MOST and "->" not in sentence and "(" not in sentence:
                yield f"{module}.{name}", sentence.rstrip(".") + "."


def main(file: str) -> None:
    rng = random.Random(0)
    found = list(facts())
    rng.shuffle(found)
    with Path(file).open("w", encoding="utf-8") as out:
        for name, answer in found:
            question = rng.choice(QUESTIONS).format(name)
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": turns}) + "\n")
    print(f"{file}: {len(found)} dialogues")


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["dialogues.jsonl"])
