"""What a peer keeps of itself in its folder, so that it need not learn all from the first round when started again.

::

    state-000010/                   after ten rounds; whole, or not there
        peer/, shadow/              weights and moments (:mod:`planaria.swarm.records.peer_state`)
        memory.json                 whose run it is, and what the defence remembers
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import Field

from planaria import documents
from planaria.documents import Record
from planaria.errors import UserError
from planaria.swarm.checks.defence import Memory
from planaria.swarm.learning.learner import Learner
from planaria.swarm.records.peer_state import load_state, save_state

_MEMORY = "memory.json"
_STATE = re.compile(r"state-(\d{6,})")


class _Kept(Record):
    run: str
    round: int
    defence: Memory
    digests: dict[str, str] = Field(default_factory=dict)
    """learner → SHA-256 of its file; empty where an older planaria wrote it"""


def keep(folder: Path, run: str, round: int, learners: Mapping[str, Learner], memory: Memory) -> None:
    """Write down what a peer is after ``round`` rounds of ``run``; what it was before is removed then.

    :raises OSError: when the disk is full or the folder cannot be written; what was there stays.
    """
    whole = folder / f"state-{round:06d}"
    unfinished = folder / f"{whole.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    digests = {
        name: save_state(unfinished / name, learner.policy.module, learner.optimizer, torch.Generator(), round)
        for name, learner in learners.items()
    }
    with (unfinished / _MEMORY).open("w") as file:
        file.write(documents.sealed(_Kept(run=run, round=round, defence=memory, digests=digests)))
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(whole, ignore_errors=True)
    unfinished.replace(whole)
    for number, older in _states(folder):
        if number != round:
            shutil.rmtree(older)


def recall(folder: Path, run: str, learners: Mapping[str, Learner]) -> tuple[int, Memory] | None:
    """Become what was kept last of ``run``: the round to go on with, and what the defence remembered.

    None if nothing was kept, or of another run.

    :raises UserError: when it is damaged, or of another policy.
    """
    states = _states(folder)
    if not states:
        return None
    _, place = max(states)
    try:
        kept = documents.unsealed(place / _MEMORY, _Kept)
        if kept.run != run:
            return None
        for name, learner in learners.items():
            known = kept.digests.get(name, "")
            load_state(place / name, learner.policy.module, learner.optimizer, torch.Generator(), known)
    except (UserError, OSError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"{place}: cannot be gone on from ({why}); remove it to learn from the first round") from None
    return kept.round, kept.defence


def _states(folder: Path) -> list[tuple[int, Path]]:
    found = ((_STATE.fullmatch(path.name), path) for path in folder.iterdir())
    return [(int(match[1]), path) for match, path in found if match]
