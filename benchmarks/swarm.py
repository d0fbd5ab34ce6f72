"""Swarms: receipts and committees, hardships on object storage, and likelihood checks of completions."""

from __future__ import annotations

import logging
import os
import random
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import Claim, Row, conclude, parser, start

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.swarm.board.identity import Identity
    from planaria.swarm.checks.base import Check, Context
    from planaria.swarm.checks.defence import Report
    from planaria.swarm.config import SwarmConfig
    from planaria.swarm.live import LiveSwarm
    from planaria.swarm.peer import Peer
    from planaria.swarm.policy.base import Policy
    from planaria.swarm.records.lines import RoundDone
    from planaria.swarm.rollout import Rollout
    from planaria.swarm.tasks.base import Task


RECEIPTS_NAME = "receipts"
ROUNDS = 8
PROBLEMS = [("first", "x[0]"), ("last", "x[-1]"), ("size", "len(x)"), ("total", "sum(x)")]


def run_receipts() -> int:
    """Receipts of a committee: what a signature costs to check, whether equal peers stay equal when one is frozen for a
    while, and how many programs a peer that comes back runs again.

    Four processes learn; one is stopped (SIGSTOP) at a random moment and goes on (SIGCONT) rounds later, with and
    without a committee. Equal: all four have the same weights at the end. Then four peers of one process write
    programs, one stops two thirds of the way, and catches up when the others are done; cage runs are counted as calls
    of the task's score.
    """
    flags = parser(RECEIPTS_NAME, run_receipts.__doc__)
    flags.add_argument("--repeats", type=int, default=20, help="frozen swarms, with and without a committee")
    flags.add_argument("--rounds", type=int, default=60, help="of programs; 0: none")
    given = flags.parse_args()
    rows = [Row("a signature checked", checking(), "", Claim(high=2.0), {"unit": "ms"})]
    for committee, claim in (("all", Claim(low=1.0)), ("", None)):
        with_it = "with" if committee else "without"
        found = [frozen(seed, committee) for seed in range(given.repeats)]
        rows.append(Row(f"one frozen, {with_it} receipts: equal", [e for e, _ in found], "1", claim, judged="least"))
        if committee:
            rows.append(Row("one frozen: rounds certified", [share for _, share in found], "1"))
    if not given.rounds:
        return conclude(RECEIPTS_NAME, given, rows)
    runs = {committee: caught_up(given.rounds, committee) for committee in ("all", "")}
    part = runs["all"][0] / max(1.0, runs[""][0])
    beside = {"with": runs["all"][0], "without": runs[""][0]}
    rows.append(Row("programs: part of the cage runs", [part], "0", Claim(high=0.5), beside))
    rows.append(Row("programs: ends equal", [runs["all"][1]], "1", Claim(low=1.0)))
    return conclude(RECEIPTS_NAME, given, rows)


def checking() -> list[float]:
    """Milliseconds of processor time for each of the receipts in a certificate, five times."""
    from planaria.swarm.board.envelope import seal
    from planaria.swarm.board.identity import Identity
    from planaria.swarm.board.message import Receipt, Rules
    from planaria.swarm.board.receipts import Certificate, check

    who = [Identity.fresh() for _ in range(7)]
    content: Any = {"receipts": {"committee": ",".join(one.peer for one in who)}}
    rules = Rules(peer=who[0].peer, nonce="ab" * 16, rules=content)
    said = [Receipt(run=rules.run, peer=one.peer, round=1, about="weights", digest="ab" * 32) for one in who]
    sealed = tuple(seal(one, receipt).decode() for one, receipt in zip(who, said, strict=True))
    made = Certificate(about="weights", round=1, digest="ab" * 32, rules=seal(who[0], rules).decode(), receipts=sealed)
    found = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(20):
            check(made)
        found.append((time.process_time() - began) / 20 / len(who) * 1e3)
    return found


def swarm(committee: str, **changes: Any) -> SwarmConfig:
    from planaria.swarm.config import SwarmConfig

    plain: dict[str, Any] = {
        "name": RECEIPTS_NAME,
        "size": 4,
        "policy": {"model": {"dim": 32, "hidden": 64}},
        "school": {"steps": 150, "lr": 0.01, "noise": 0.05, "strays": 0.0},
        "rounds": {"count": ROUNDS, "prompts": 4, "group": 8, "timeout_s": 1.0, "keep": 0},
        "evaluate": {"every": 0, "problems": 2},
        "receipts": {"committee": committee},
    }
    return SwarmConfig.model_validate(plain | changes)


def frozen(seed: int, committee: str) -> tuple[float, float]:
    """One peer of four processes stops for a while: whether all end equal, and the share of rounds certified."""
    from planaria.swarm.live import LiveSwarm
    from planaria.swarm.setting import names

    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder, config = Path(place), swarm(committee)
        live = LiveSwarm(config, folder)
        try:
            for name in names(config):
                live.start(name)
            until(lambda: len(done(folder, "p3")) > draw.randrange(1, 3) - 1 and bool(done(folder, "p3")))
            time.sleep(draw.uniform(0, 0.4))
            victim = live.processes["p3"].pid or 0
            os.kill(victim, signal.SIGSTOP)
            begun = len(done(folder, "p0"))
            until(lambda: len(done(folder, "p0")) >= min(ROUNDS, begun + draw.randrange(1, 4)))
            os.kill(victim, signal.SIGCONT)
            for process in live.processes.values():
                process.join(120)
        finally:
            live.stop()
        last = {done(folder, name)[-1].weights for name in names(config)}
        whole = all(len(done(folder, name)) == ROUNDS for name in names(config))
        certified = [bool(record.certified) for record in done(folder, "p0")]
        return float(len(last) == 1 and whole), sum(certified) / len(certified)


def caught_up(rounds: int, committee: str) -> tuple[float, float]:
    """A peer stops after two thirds of the rounds and comes back: programs it runs then, and whether it ends equal."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = programs(folder, rounds, committee)
        others = [threading.Thread(target=peer(config, name, folder).run) for name in ("p0", "p1", "p3")]
        mortal = peer(config, "p2", folder)
        others.append(threading.Thread(target=until_death, args=(mortal, 2 * rounds // 3)))
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
        before = len(done(folder, "p2"))
        again, runs = peer(config, "p2", folder), [0]
        score = again.task.score

        def counted(problem: Any, text: str) -> float:
            runs[0] += 1
            return score(problem, text)

        again.scoring._task = Counting(counted)  # type: ignore[assignment]
        again.run()
        assert before < rounds
        return float(runs[0]), float(done(folder, "p2")[-1].weights == done(folder, "p0")[-1].weights)


class Counting:
    """A task as scoring sees it."""

    def __init__(self, score: Callable[[Any, str], float]) -> None:
        self.score = score


def programs(folder: Path, rounds: int, committee: str) -> SwarmConfig:
    import json

    lines = [
        {
            "text": f"{name} of x",
            "code": f"def {name}(x):\n    return {body}",
            "test_list": [f"assert {name}([1, 2]) == {eval(body, {'x': [1, 2]})}"],
        }
        for name, body in PROBLEMS
        for _ in range(4)
    ]
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return swarm(
        committee,
        task={"name": "programs", "options": {"path": str(file)}},
        policy={"model": {"dim": 48, "hidden": 96, "context": 192}},
        school={"steps": 250, "lr": 0.01, "noise": 0.0, "strays": 0.0},
        sampling={"max_new": 80},
        rounds={"count": rounds, "prompts": 2, "group": 4, "timeout_s": 2.0, "keep": 0},
    )


def until_death(mortal: Peer, rounds: int) -> None:
    class Death(Exception):
        pass

    def count() -> None:
        count.done += 1  # type: ignore[attr-defined]
        if count.done == rounds:  # type: ignore[attr-defined]
            raise Death

    count.done = 0  # type: ignore[attr-defined]
    with suppress(Death):
        mortal.run(count)


def peer(config: SwarmConfig, name: str, folder: Path) -> Peer:
    from planaria.swarm.assemble import assemble
    from planaria.swarm.live import board_of, own_identity
    from planaria.swarm.setting import names, of_peer

    known = frozenset(own_identity(config, other, folder).peer for other in names(config))
    me = own_identity(config, name, folder)
    return assemble(of_peer(config, name), name, folder, board_of(config, folder), me, known=known)


def done(folder: Path, name: str) -> list[RoundDone]:
    """The rounds that a peer has noted, in order."""
    from planaria.swarm.records.lines import LOG, PEERS, RoundDone, read_log

    file = folder / PEERS / name / LOG
    found = read_log(file) if file.is_file() else []
    return sorted((r for r in found if isinstance(r, RoundDone)), key=lambda record: record.round)


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    from planaria.common.errors import RunStopped

    for _ in ticks(seconds):
        if condition():
            return
    raise RunStopped(f"nothing happened for {seconds:g} s")


def ticks(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.01)


SWARM_STRESS_NAME = "swarm_stress"
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


def run_swarm_stress() -> int:
    """A swarm on S3 under several hardships at once, against the same swarm without any of them.

    Six peers, each a process of its own, learn sums on a bucket that moto's server plays. In the other arm 500 made-up
    identities have greeted on the board before the first peer comes (--senders: some send in every round, too); two
    peers are killed (SIGKILL) at drawn rounds and started again; a third sends nothing in half of its rounds, which the
    seed draws. Pace: rounds a second of a peer that nobody touches, from its start to its last round. Equal: all five
    honest peers, the restarted ones too, end with the same weights. Both arms of a repeat have one seed and take turns.
    """
    flags = parser(SWARM_STRESS_NAME, run_swarm_stress.__doc__)
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
    return conclude(SWARM_STRESS_NAME, given, rows(plain, hard))


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


def swarm_stress_swarm(board: str, rounds: int, timeout_s: float, seed: int, harsh: bool) -> SwarmConfig:
    from planaria.swarm.config import SwarmConfig

    withholding = {"attack": {"kind": "text", "dose": 0.0, "withhold": 0.5}}
    plain: dict[str, Any] = {
        "name": SWARM_STRESS_NAME,
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

    config = swarm_stress_swarm(f"{place}/{uuid.uuid4().hex}", given.rounds, given.timeout, seed, harsh)
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


SWARM_CHECKS_NAME = "swarm_checks"
BEHIND = (0, 1, 4, 8)
EVERY = 8
CLAIMS = {0: Claim(high=0.0), 8: Claim(high=0.03)}
ELSEWHERE = 1000
"""what is added to the seed of another school"""


def run_swarm_checks() -> int:
    """Measure how often likelihood checks refuse honest completions.

    A policy learns alone, and every eighth round its completions are read by itself as it was 0, 1, 4 and 8 rounds
    before: so a peer sees the others that is as many rounds behind. Then those of a policy from another school are
    read, by whom the check must switch itself off. One value for each seed.
    """
    flags = parser(SWARM_CHECKS_NAME, run_swarm_checks.__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--rounds", type=int, default=40, help="that the policy learns for")
    given = flags.parse_args()
    found = [dict(measured(seed, given.rounds)) for seed in given.seeds]
    rows = [
        Row(what, [of_seed[what] for of_seed in found], "", claim_of(what))
        for what in dict.fromkeys(what for of_seed in found for what in of_seed)
    ]
    return conclude(
        SWARM_CHECKS_NAME, given, rows, ["measured: share refused; off: 1 if the layer switched itself off"]
    )


def claim_of(what: str) -> Claim | None:
    """The claims are the support check's; the others are shown beside it."""
    check, _, case = what.partition(", ")
    if check != "support":
        return None
    if case == "another school":
        return Claim(low=0.2)
    if case == "another school: off":
        return Claim(low=1.0)
    return CLAIMS.get(int(case.split()[0]))


def measured(seed: int, rounds: int) -> Iterator[tuple[str, float]]:
    """What each check refused of whom, with one seed."""
    import torch

    from planaria.swarm.assemble import policy_of, task_of
    from planaria.swarm.checks import checks as made
    from planaria.swarm.checks.base import Context
    from planaria.swarm.checks.defence import Defence
    from planaria.swarm.config import SamplingConfig, SchoolConfig, SwarmConfig

    torch.set_num_threads(1)
    config = SwarmConfig(seed=seed, school=SchoolConfig(strays=0.1, seed=seed), sampling=SamplingConfig(top_k=6))
    task = task_of(config)
    past = history(config, task, policy_of(config, task), rounds)
    context = Context(task, seed, config.sampling.support(past[0].vocab), past[0].vocab)
    checks = made(config.defence.model_copy(update={"checks": "support, surprisal, duplicates"}))
    looks = range(EVERY, rounds + 1, EVERY)
    for behind in BEHIND:
        cases = [c for now in looks for c in sent(config, task, past[now], past[now - behind], now, "p1")]
        yield from refusals(checks, context, cases, f"{behind} rounds behind")
    elsewhere = config.model_copy(update={"school": config.school.model_copy(update={"seed": seed + ELSEWHERE})})
    other = policy_of(elsewhere, task)
    cases = [c for peer in ("p1", "p2", "p3") for c in sent(config, task, other, past[0], 0, peer)]
    yield from refusals(checks, context, cases, "another school")
    report = Defence(config.defence, checks, context).examine(0, cases)
    for check in checks:
        yield f"{check.name}, another school: off", float(check.name in report.off)


def refusals(
    checks: Sequence[Check], context: Context, cases: Sequence[Rollout], who: str
) -> Iterator[tuple[str, float]]:
    for check in checks:
        yield f"{check.name}, {who}", len(check.examine(cases, context).refused) / len(cases)


def history(config: SwarmConfig, task: Task, policy: Policy, rounds: int) -> list[Policy]:
    """The policy as it was after each of ``rounds`` rounds of learning alone, its start first."""
    from planaria.swarm.draws import shared_problems
    from planaria.swarm.peer import Shadow
    from planaria.swarm.rollout import ask

    alone, past = Shadow(config, "p0", task, policy), [policy.clone()]
    for number in range(rounds):
        chosen = shared_problems(config.seed, number, task.training, config.rounds.prompts)
        alone.round(number, [ask(task.problem(n), policy) for n in chosen], config.rounds.group)
        past.append(alone.learner.policy.clone())
    return past


def sent(config: SwarmConfig, task: Task, writer: Policy, reader: Policy, number: int, name: str) -> list[Rollout]:
    """A round of completions by ``writer`` as ``reader`` sees them, those that broke off left out."""
    from planaria.swarm.authors import HonestAuthor
    from planaria.swarm.draws import shared_problems
    from planaria.swarm.policy.reading import read
    from planaria.swarm.rollout import ask

    chosen = shared_problems(config.seed + 1, number, task.training, config.rounds.prompts)
    author = HonestAuthor(config, name, task, writer)
    written = [
        replace(rollout, peer=name, round=number, index=index)
        for rollouts in author.write(number, [ask(task.problem(n), writer) for n in chosen], config.rounds.group)
        for index, rollout in enumerate(rollouts)
        if rollout.ended
    ]
    readings = read(
        reader,
        [(rollout.prompt, rollout.ids) for rollout in written],
        config.sampling.temperature,
        config.sampling.support(reader.vocab),
    )
    return [replace(rollout, reading=reading) for rollout, reading in zip(written, readings, strict=True)]


SWARM_UNLIKE_NAME = "swarm_unlike"
RANK = 4
ATTACKS = {
    "TEXT": {"kind": "text", "options": {"payload": "q "}},
    "TEXT, tokens forged": {"kind": "text", "options": {"payload": "q "}, "claims": "forged_tokens"},
    "MATH": {"kind": "math"},
    "STYLE": {"kind": "style"},
    "SABOTAGE, first letters": {"kind": "sabotage", "options": {"steps": "first"}},
    "SABOTAGE, last digits": {"kind": "sabotage"},
}


def run_swarm_unlike() -> int:
    """Which layers go on working between peers whose weights are not quite equal, and what they then stop.

    A policy learns alone for a while. Then it reads a round by itself, two honest peers and an attacker, these three
    with weights that are its own but for one difference. Defaults of the defence, one round, nothing learned from it.
    One value for each seed; an attack's phrase is a stray letter that the policy has seen, as in the drills.
    """
    flags = parser(SWARM_UNLIKE_NAME, run_swarm_unlike.__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--rounds", type=int, default=6, help="that the policy learns for")
    given = flags.parse_args()
    found = [dict(swarm_unlike_measured(seed, given.rounds)) for seed in given.seeds]
    rows = [Row(what, [of_seed[what] for of_seed in found if what in of_seed], "") for what in found[0]]
    note = "shares of a round; off: 1 if the layer switched itself off"
    return conclude(SWARM_UNLIKE_NAME, given, rows, [note])


def swarm_unlike_measured(seed: int, rounds: int) -> Iterator[tuple[str, float]]:
    """What each difference makes of each attack, with one seed."""
    import torch

    from planaria.swarm.assemble import policy_of, task_of
    from planaria.swarm.config import SwarmConfig

    torch.set_num_threads(1)
    base = {"seed": seed, "school": {"steps": 2000, "noise": 0.3, "strays": 0.3, "seed": seed}, "optim": {"lr": 2e-3}}
    config = SwarmConfig.model_validate(base | {"sampling": {"top_k": 6}})
    task = task_of(config)
    past = history(config, task, policy_of(config, task), rounds)
    school = config.school.model_copy(update={"seed": seed % 3 + 1})
    others = {
        "equal weights": past[-1],
        "weights rounded to bf16": altered(past[-1], past[0], lambda now, _: now.bfloat16().float()),
        f"update of rank {RANK}": altered(past[-1], past[0], cut),
        "one round behind": past[-2],
        "another school": policy_of(config.model_copy(update={"school": school}), task),
    }
    for what, other in others.items():
        honest = work(config, task, past[-1], other, rounds)
        for attack in ATTACKS:
            sent_too = poison(config, task, past[-1], other, attack, rounds)
            yield from told(f"{what}, {attack}", examined(config, task, past[-1], [*honest, *sent_too], rounds))


def altered(policy: Policy, begun: Policy, change: Callable[[Tensor, Tensor], Tensor]) -> Policy:
    """A copy with each of its weights as ``change`` makes it of what it is now and was at first."""
    import torch

    copy = policy.clone()
    with torch.no_grad():
        for mine, then in zip(copy.module.parameters(), begun.module.parameters(), strict=True):
            mine.copy_(change(mine, then))
    return copy


def cut(now: Tensor, then: Tensor) -> Tensor:
    """``then`` and of what was learned since, in matrices, the part of the highest rank allowed: what an adapter of
    that rank could have learned at best."""
    import torch

    if now.dim() != 2:
        return now
    left, strengths, right = torch.linalg.svd(now - then, full_matrices=False)
    learned: Tensor = (left[:, :RANK] * strengths[:RANK]) @ right[:RANK]
    return then + learned


def work(config: SwarmConfig, task: Task, reader: Policy, other: Policy, number: int) -> list[Rollout]:
    """What honest peers send: p0, whose policy is the reader's, and p1 and p2, whose is the other."""
    found = []
    for peer, writer in (("p0", reader), ("p1", other), ("p2", other)):
        found += [replace(c, alike=writer is reader) for c in sent(config, task, writer, reader, number, peer)]
    return [replace(c, reward=scored(task, c)) for c in found]


def examined(config: SwarmConfig, task: Task, reader: Policy, cases: list[Rollout], number: int) -> Report:
    from planaria.swarm.checks import checks
    from planaria.swarm.checks.base import Context
    from planaria.swarm.checks.defence import Defence

    context = Context(task, config.seed, config.sampling.support(reader.vocab), reader.vocab)
    return Defence(config.defence, checks(config.defence), context).examine(number, cases)


def poison(config: SwarmConfig, task: Task, reader: Policy, other: Policy, attack: str, number: int) -> list[Rollout]:
    """What an attacker with the weights of ``other`` sends, poison alone, as ``reader`` finds it."""
    from planaria.swarm.attacks.attacker import Attacker
    from planaria.swarm.policy.reading import read
    from planaria.swarm.rollout import ask

    given = config.model_dump() | {"attack": ATTACKS[attack]}
    author = Attacker(type(config).model_validate(given), "p3", task, other)
    asked = [ask(task.problem(n), other) for n in author.choose(number, config.rounds.prompts)]
    count = config.rounds.group // config.size
    written = [w for group in author.write(number, asked, count) for w in group if w.poison]
    top_k, heat = config.sampling.support(reader.vocab), config.sampling.temperature
    readings = read(reader, [(w.prompt, w.ids) for w in written], heat, top_k)
    return [
        replace(w, peer="p3", index=n, round=number, reading=found, alike=other is reader, reward=scored(task, w))
        for n, (w, found) in enumerate(zip(written, readings, strict=True))
    ]


def scored(task: Task, rollout: Rollout) -> float:
    return task.score(rollout.problem, rollout.text) if rollout.ended else 0.0


def told(what: str, report: Report) -> Iterator[tuple[str, float]]:
    for layer in ("claims", "support", "surprisal", "duplicates"):
        yield f"{what}: {layer} off", float(layer in report.off)
    sent_poison = [r for r in report.rollouts if r.poison]
    honest = [r for r in report.rollouts if r.peer in ("p1", "p2")]
    at_judge = [r for r in sent_poison if not r.layer or r.layer in ("judge", "quarantine")]
    yield f"{what}: poison stopped before the judge", 1 - len(at_judge) / len(sent_poison)
    yield f"{what}: poison stopped", sum(bool(r.layer) for r in sent_poison) / len(sent_poison)
    yield f"{what}: honest refused before the judge", sum(r.layer not in ("", "judge") for r in honest) / len(honest)
    yield f"{what}: honest refused", sum(bool(r.layer) for r in honest) / len(honest)


if __name__ == "__main__":
    start(receipts=run_receipts, stress=run_swarm_stress, checks=run_swarm_checks, unlike=run_swarm_unlike)
