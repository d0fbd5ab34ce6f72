"""Dialogues with answers of very unequal length."""

from __future__ import annotations

import json
import random
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def write_dialogues(folder: Path, count: int = 120, longest: int = 12) -> dict[str, str]:
    """Write dialogues with answers of 1, 2 and up to ``longest`` letters, and a chat template, to ``folder``.

    Returns the settings of ``data`` for them.
    """
    rng = random.Random(5)
    records, template = folder / "dialogues.jsonl", folder / "dialogues.jinja"
    if not records.exists():
        dialogues = []
        for _ in range(count):
            question, answer = ("".join(rng.choices("abcd ", k=rng.randint(1, most))) for most in (12, longest))
            roles = {"user": question, "assistant": answer[: rng.choice([1, 2, longest])]}
            dialogues.append({"messages": [{"role": role, "content": text} for role, text in roles.items()]})
        records.write_text("".join(json.dumps(talk) + "\n" for talk in dialogues))
        template.write_text(TEMPLATE)
    return {"source": str(records), "template": str(template), "format": "messages"}
