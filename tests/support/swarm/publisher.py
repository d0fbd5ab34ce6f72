"""A publishing peer as a process: `python -m support.swarm.publisher BOARD KEY ROUNDS CHARACTERS [hang]`.

It publishes one big message per round. With "hang" it stops after writing the last message, before its rename.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from planaria.swarm.board.board import Board
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.message import Completion, ProblemCompletions
from support.swarm.swarm_messages import hello, rollouts


def main(place: str, key: str, rounds: int, characters: int, hang: bool) -> None:
    who = PeerIdentity.load_or_create(Path(key))
    board = Board(place, who)
    run = board.create_run({"task": "sums"}).run
    board.join(hello(who, run))
    groups = (ProblemCompletions(problem=0, completions=(Completion(text="x" * characters, ended=True),) * 60),)
    print("joined", flush=True)
    for round in range(rounds):
        if hang and round == rounds - 1:
            os.fsync = hung  # type: ignore[assignment]
        board.publish(rollouts(who, run, round, groups=groups))
    print("done", flush=True)


def hung(_: int) -> None:
    print("hung", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:] == ["hang"])
