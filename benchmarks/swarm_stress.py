"""A swarm on S3 under several hardships at once, against the same swarm without any of them.

Six peers, each a process of its own, learn sums on a bucket that moto's server plays. In the other arm 500 made-up
identities have greeted on the board before the first peer comes (--senders: some send in every round, too); two peers
are killed (SIGKILL) at drawn rounds and started again; a third sends nothing in half of its rounds, which the
seed draws. Pace: rounds a second of a peer that nobody touches, from its start to its last round. Equal: all five
honest peers, the restarted ones too, end with the same weights. Both arms of a repeat have one seed and take turns.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import Claim, Row, conclude, parser, start
from benchmarks.receipts import done, until

if TYPE_CHECKING:
    from planaria.swarm.board.identity import Identity
    from planaria.swarm.config import SwarmConfig
    from planaria.swarm.live import LiveSwarm

NAME = "swarm_stress"
UNTOUCHED, KILLED, WITHHOLDS = "p0", ("p3", "p4"), "p5"
LONGEST_S = 400.0
"""of an arm"""


@dataclass(frozen=True)
class Ended:
    """What an arm came to."""

    pace: float
    """rounds a second"""
    arrival_s: float
    """until the untouched peer had found the others"""
    equal: float
    whole: float
    """share of the honest peers that learned from all rounds"""
    alone: float
    """share of the untouched peer's rounds in which some honest peer was not heard"""
    waited: int
    """of its rounds, those that waited as long as the time-out, for messages or for closings"""
    pace_otherwise: float
    """rounds a second, a time-out taken off for each of these"""


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--repeats", type=int, default=3)
    flags.add_argument("--rounds", type=int, default=12)
    flags.add_argument("--identities", type=int, default=500, help="made up, on the board before the first peer")
    flags.add_argument("--senders", type=int, default=0, help="of these, who send a message in every round")
    flags.add_argument("--timeout", type=float, default=4.0, help="seconds that a round waits for who is late")
    given = flags.parse_args()
    plain: list[Ended] = []
    hard: list[Ended] = []
    with bucket() as place:
        for repeat in range(given.repeats):
            for harsh in (False, True) if repeat % 2 == 0 else (True, False):
                (hard if harsh else plain).append(arm(place, given, repeat + 1, harsh))
                print(
                    f"repeat {repeat + 1}, {'hardships' if harsh else 'plain'}: {(hard if harsh else plain)[-1]}",
                    flush=True,
                )
    return conclude(NAME, given, rows(plain, hard))


def rows(plain: Sequence[Ended], hard: Sequence[Ended]) -> list[Row]:
    ratios = [h.pace / p.pace for h, p in zip(hard, plain, strict=True)]
    otherwise = [h.pace_otherwise / p.pace_otherwise for h, p in zip(hard, plain, strict=True)]
    return [
        Row("pace over that of the plain arm", ratios, "1", Claim(low=0.8)),
        Row("the same, a time-out taken off for each round that waited as long", otherwise, "1"),
        Row("rounds that waited as long as the time-out, plain", [e.waited for e in plain], "0"),
        Row("rounds that waited as long as the time-out, hardships", [e.waited for e in hard], "0"),
        Row("rounds a second, plain", [e.pace for e in plain], ""),
        Row("rounds a second, hardships", [e.pace for e in hard], ""),
        Row("honest peers end equal, plain", [e.equal for e in plain], "1", Claim(low=1.0), judged="least"),
        Row("honest peers end equal, hardships", [e.equal for e in hard], "1", Claim(low=1.0), judged="least"),
        Row("honest peers that learned all rounds", [e.whole for e in hard], "1", Claim(low=1.0), judged="least"),
        Row("rounds without some honest peer, plain", [e.alone for e in plain], "0"),
        Row("rounds without some honest peer, hardships", [e.alone for e in hard], "0"),
        Row("seconds until the others are found, plain", [e.arrival_s for e in plain], ""),
        Row("seconds until the others are found, hardships", [e.arrival_s for e in hard], ""),
    ]


@contextmanager
def bucket() -> Iterator[str]:
    """A bucket on a server of this process, which s3fs finds by the environment that the peers inherit."""
    from planaria.common.errors import UserError

    try:
        import s3fs
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        raise UserError(f"{error.name} is not installed; pip install 'planaria[s3]' 'moto[server]'") from None
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would print a line for each request
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        s3fs.S3FileSystem().mkdir("swarm")
        yield "s3://swarm"
    finally:
        server.stop()


def swarm(board: str, rounds: int, timeout_s: float, seed: int, harsh: bool) -> SwarmConfig:
    from planaria.swarm.config import SwarmConfig

    withholding = {"attack": {"kind": "text", "dose": 0.0, "withhold": 0.5}}
    plain: dict[str, Any] = {
        "name": NAME,
        "board": board,
        "seed": seed,
        "size": 6,
        "policy": {"model": {"dim": 32, "hidden": 64}},
        "school": {"steps": 150, "lr": 0.01, "noise": 0.05, "strays": 0.0},
        "rounds": {"count": rounds, "prompts": 4, "group": 12, "timeout_s": timeout_s, "keep": 2},
        "evaluate": {"every": 0, "problems": 2},
        "peers": {WITHHOLDS: withholding} if harsh else {},
    }
    return SwarmConfig.model_validate(plain)


def arm(place: str, given: Any, seed: int, harsh: bool) -> Ended:
    from planaria.swarm.live import LiveSwarm
    from planaria.swarm.setting import names

    config = swarm(f"{place}/{uuid.uuid4().hex}", given.rounds, given.timeout, seed, harsh)
    found(config, given.identities if harsh else 0, given.senders)
    with tempfile.TemporaryDirectory() as folder:
        live = LiveSwarm(config, Path(folder))
        try:
            began = time.time()
            for name in names(config):
                live.start(name)
            if harsh:
                killed(live, random.Random(seed))
            until(lambda: all(len(done(live.folder, name)) == given.rounds for name in names(config)), LONGEST_S)
            for process in live.processes.values():
                process.join(30)
        finally:
            live.stop()
        return judged(live.folder, config, began)


def found(config: SwarmConfig, identities: int, senders: int) -> None:
    """The run on its board, and so many who greet there; the first of them have sent for every round already."""
    from planaria.swarm.assemble import task_of
    from planaria.swarm.board.board import Board
    from planaria.swarm.board.identity import Identity
    from planaria.swarm.setting import rules

    run = Board.open(config.board, Identity.fresh()).found(rules(config, task_of(config))).run
    crowd = [Identity.fresh() for _ in range(identities)]
    files = [file for n, who in enumerate(crowd) for file in said(who, run, config.rounds.count if n < senders else 0)]
    if files:
        import s3fs

        system = s3fs.S3FileSystem()
        with ThreadPoolExecutor(4) as several:
            list(several.map(lambda file: system.pipe_file(f"{config.board}/{file[0]}", file[1]), files))


def said(who: Identity, run: str, rounds: int) -> Iterator[tuple[str, bytes]]:
    """What a made-up identity puts on the board: a greeting, and for so many rounds a message without completions."""
    from planaria.swarm.board.envelope import seal
    from planaria.swarm.board.message import Hello, Rollouts

    folder, tokenizer = f"peers/{who.peer}", "00" * 8
    hello = Hello(run=run, peer=who.peer, key=who.public.hex(), name="x", tokenizer=tokenizer, model="x", joined=0)
    yield f"{folder}/hello.json", seal(who, hello)
    for number in range(rounds):
        message = Rollouts(run=run, peer=who.peer, round=number, tokenizer=tokenizer, weights="", groups=())
        yield f"{folder}/{message.place}", seal(who, message)


def killed(live: LiveSwarm, draw: random.Random) -> None:
    """Kill each of the mortal peers at a moment of some round and start it again when the others are a round on."""
    rounds = live.config.rounds.count
    for nth, name in enumerate(KILLED):
        after = 1 + nth * rounds // 3 + draw.randrange(0, max(1, rounds // 4))
        until(lambda name=name, after=after: len(done(live.folder, name)) >= after, LONGEST_S)  # type: ignore[misc]
        time.sleep(draw.uniform(0, 1))
        live.processes[name].signal(signal.SIGKILL)
        live.processes[name].join(10)
        before = len(done(live.folder, UNTOUCHED))
        until(lambda before=before: len(done(live.folder, UNTOUCHED)) > before, LONGEST_S)  # type: ignore[misc]
        live.start(name)


def judged(folder: Path, config: SwarmConfig, began: float) -> Ended:
    from planaria.swarm.records.lines import LOG, PEERS, Started, read_log
    from planaria.swarm.setting import names

    honest = [name for name in names(config) if name != WITHHOLDS]
    started = {
        name: next(r for r in read_log(folder / PEERS / name / LOG) if isinstance(r, Started)) for name in honest
    }
    ids = {started[name].id for name in honest}
    rounds = done(folder, UNTOUCHED)
    ends = {done(folder, name)[-1].weights for name in honest}
    everything = [{r.round for r in done(folder, name)} == set(range(config.rounds.count)) for name in honest]
    span = rounds[-1].time - started[UNTOUCHED].time
    waits = [wait for record in rounds if (wait := record.seconds["wait"]) >= config.rounds.timeout_s]
    return Ended(
        pace=len(rounds) / span,
        arrival_s=started[UNTOUCHED].time - began,
        equal=float(len(ends) == 1),
        whole=sum(everything) / len(everything),
        alone=sum(not ids <= record.sent.keys() for record in rounds) / len(rounds),
        waited=len(waits),
        pace_otherwise=len(rounds) / (span - len(waits) * config.rounds.timeout_s),
    )


if __name__ == "__main__":
    start(main)
