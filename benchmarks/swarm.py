"""Swarms: receipts and committees, hardships on object storage, and likelihood checks of completions."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import tempfile
import threading
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, ratios, start
from benchmarks.processes import wait_until
from planaria.common.errors import UserError
from planaria.swarm.assemble import assemble, make_policy, make_task
from planaria.swarm.attacks.attacker import Attacker
from planaria.swarm.board.board import Board
from planaria.swarm.board.envelope import seal
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.message import Hello, Receipt, Rollouts
from planaria.swarm.certificate import RunCertificate
from planaria.swarm.checks.base import Check, Context
from planaria.swarm.checks.defence import Defence, DefenceReport
from planaria.swarm.config.policy_config import SupervisedWarmupConfig
from planaria.swarm.config.swarm_config import SamplingConfig, SwarmConfig
from planaria.swarm.config.swarm_recipe import peer_config, peer_names
from planaria.swarm.peer.author import Author
from planaria.swarm.peer.peer import Peer
from planaria.swarm.peer.random_draws import shared_problems
from planaria.swarm.peer.rollout import Rollout, prompt_for, read_rollouts
from planaria.swarm.peer.shadow import Shadow
from planaria.swarm.policy.base import Policy
from planaria.swarm.records.lines import LOG, PEERS, PeerStarted, RoundDone, read_log
from planaria.swarm.swarm_processes import LiveSwarm, board_address, own_identity
from planaria.swarm.tasks.base import Task

ROUNDS = 8
PROBLEMS = [("first", "x[0]"), ("last", "x[-1]"), ("size", "len(x)"), ("total", "sum(x)")]


@benchmark(
    "receipts", repeats=Flag(20, "frozen swarms, with and without a committee"), rounds=Flag(60, "of programs; 0: none")
)
def run_receipts(args: Namespace) -> Measurement:
    """Measure receipts: the cost of a check, equality of peers when one is frozen, and programs run after a return.

    Four processes learn; one is stopped (SIGSTOP) at a random moment and continued rounds later, with and without a
    committee. Equal: all four end with the same weights. Then four peers in one process write programs; one stops after
    two thirds of the rounds and catches up later. Sandbox runs are counted as calls of the task's score.
    """
    rows = [Row("a signature checked", checking(), "", Claim(high=2.0), {"unit": "ms"})]
    for committee, claim in (("all", Claim(low=1.0)), ("", None)):
        with_it = "with" if committee else "without"
        found = [frozen(seed, committee) for seed in range(args.repeats)]
        rows.append(Row(f"one frozen, {with_it} receipts: equal", [e for e, _ in found], "1", claim, judged="least"))
        if committee:
            rows.append(Row("one frozen: rounds certified", [share for _, share in found], "1"))
    if not args.rounds:
        return rows
    runs = {committee: caught_up(args.rounds, committee) for committee in ("all", "")}
    part = runs["all"][0] / max(1.0, runs[""][0])
    columns = {"with": runs["all"][0], "without": runs[""][0]}
    rows.append(Row("programs: part of the cage runs", [part], "0", Claim(high=0.5), columns))
    rows.append(Row("programs: ends equal", [runs["all"][1]], "1", Claim(low=1.0)))
    return rows


def checking() -> list[float]:
    """Return the milliseconds of processor time per receipt of a certificate, five times."""
    from planaria.swarm.board.message import RunRules
    from planaria.swarm.certificate import check_certificate

    who = [PeerIdentity.generate() for _ in range(7)]
    content: Any = {"receipts": {"committee": ",".join(one.peer for one in who)}}
    rules = RunRules(peer=who[0].peer, nonce="ab" * 16, rules=content)
    signed = [Receipt(run=rules.run, peer=one.peer, round=1, about="weights", digest="ab" * 32) for one in who]
    sealed = tuple(seal(one, receipt).decode() for one, receipt in zip(who, signed, strict=True))
    made = RunCertificate(
        about="weights", round=1, digest="ab" * 32, rules=seal(who[0], rules).decode(), receipts=sealed
    )
    found = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(20):
            check_certificate(made)
        found.append((time.process_time() - began) / 20 / len(who) * 1e3)
    return found


def swarm(committee: str, **changes: Any) -> SwarmConfig:
    plain: dict[str, Any] = {
        "name": "receipts",
        "size": 4,
        "policy": {"model": {"dim": 32, "hidden": 64}},
        "warmup": {"steps": 150, "lr": 0.01, "noise": 0.05, "stray_letter_probability": 0.0},
        "rounds": {"count": ROUNDS, "prompts": 4, "group": 8, "timeout_s": 1.0, "keep": 0},
        "evaluate": {"every": 0, "problems": 2},
        "receipts": {"committee": committee},
    }
    return SwarmConfig.model_validate(plain | changes)


def frozen(seed: int, committee: str) -> tuple[float, float]:
    """Freeze one of four processes; return whether all end equal, and the share of certified rounds."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder, config = Path(place), swarm(committee)
        live = LiveSwarm(config, folder)
        try:
            for name in peer_names(config):
                live.start(name)
            wait_until(
                "further round", lambda: len(done(folder, "p3")) > draw.randrange(1, 3) - 1 and bool(done(folder, "p3"))
            )
            time.sleep(draw.uniform(0, 0.4))
            victim = live.processes["p3"].pid or 0
            os.kill(victim, signal.SIGSTOP)
            begun = len(done(folder, "p0"))
            wait_until("further round", lambda: len(done(folder, "p0")) >= min(ROUNDS, begun + draw.randrange(1, 4)))
            os.kill(victim, signal.SIGCONT)
            for process in live.processes.values():
                process.join(120)
        finally:
            live.stop()
        last = {done(folder, name)[-1].weights for name in peer_names(config)}
        whole = all(len(done(folder, name)) == ROUNDS for name in peer_names(config))
        certified = [bool(record.certified) for record in done(folder, "p0")]
        return float(len(last) == 1 and whole), sum(certified) / len(certified)


def caught_up(rounds: int, committee: str) -> tuple[float, float]:
    """Stop a peer after two thirds of the rounds; return the programs it runs later, and whether it ends equal."""
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

        again.scoring._task = SimpleNamespace(score=counted)  # type: ignore[assignment]
        again.run()
        assert before < rounds
        return float(runs[0]), float(done(folder, "p2")[-1].weights == done(folder, "p0")[-1].weights)


def programs(folder: Path, rounds: int, committee: str) -> SwarmConfig:
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
        warmup={"steps": 250, "lr": 0.01, "noise": 0.0, "stray_letter_probability": 0.0},
        sampling={"max_new": 80},
        rounds={"count": rounds, "prompts": 2, "group": 4, "timeout_s": 2.0, "keep": 0},
    )


def until_death(mortal: Peer, rounds: int) -> None:
    """Run the peer until it has finished ``rounds`` rounds."""

    class Death(Exception):
        pass

    finished = count(1)

    def end() -> None:
        if next(finished) == rounds:
            raise Death

    with suppress(Death):
        mortal.run(end)


def peer(config: SwarmConfig, name: str, folder: Path) -> Peer:
    known = frozenset(own_identity(config, other, folder).peer for other in peer_names(config))
    me = own_identity(config, name, folder)
    return assemble(peer_config(config, name), name, folder, board_address(config, folder), me, known=known)


def done(folder: Path, name: str) -> list[RoundDone]:
    file = folder / PEERS / name / LOG
    found = read_log(file) if file.is_file() else []
    return sorted((r for r in found if isinstance(r, RoundDone)), key=lambda record: record.round)


UNTOUCHED, KILLED, WITHHOLDS = "p0", ("p3", "p4"), "p5"
LONGEST_S = 400.0  # of an arm


@dataclass(frozen=True)
class Ended:
    pace: float  # rounds a second
    arrival_s: float  # until the untouched peer had found the others
    equal: float
    whole: float  # share of the honest peers that learned from all rounds
    alone: float  # share of the untouched peer's rounds that miss an honest peer
    waited: int  # of its rounds, those that waited as long as the time-out, for messages or for closings
    pace_otherwise: float  # rounds a second, a time-out taken off for each of these


@benchmark(
    "swarm_stress",
    repeats=3,
    rounds=12,
    identities=Flag(500, "made up, on the board before the first peer"),
    senders=Flag(0, "of these, who send a message in every round"),
    timeout=Flag(4.0, "seconds that a round waits for who is late"),
)
def run_swarm_stress(args: Namespace) -> Measurement:
    """Measure a swarm on S3 under several hardships, against the same swarm without them.

    Six peers, each a process, learn sums on a bucket of moto's server. In the other arm 500 fake identities greet on
    the board before the first peer (--senders: some also send in every round); two peers are killed (SIGKILL) at random
    rounds and restarted; a third sends nothing in half of its rounds. Pace: rounds per second of an untouched peer.
    Equal: the five honest peers end with the same weights. Both arms of a repeat share a seed and alternate.
    """
    plain: list[Ended] = []
    hard: list[Ended] = []
    with bucket() as place:
        for repeat in range(args.repeats):
            for harsh in (False, True) if repeat % 2 == 0 else (True, False):
                ended = arm(place, args, repeat + 1, harsh)
                (hard if harsh else plain).append(ended)
                print(f"repeat {repeat + 1}, {'hardships' if harsh else 'plain'}: {ended}", flush=True)
    return rows(plain, hard)


def rows(plain: Sequence[Ended], hard: Sequence[Ended]) -> list[Row]:
    arms, least = (("plain", plain), ("hardships", hard)), Claim(low=1.0)
    pace = ratios([e.pace for e in hard], [e.pace for e in plain])
    otherwise = ratios([e.pace_otherwise for e in hard], [e.pace_otherwise for e in plain])
    waited, late = "rounds that waited as long as the time-out", "seconds until the others are found"
    return [
        Row("pace over that of the plain arm", pace, "1", Claim(low=0.8)),
        Row("the same, a time-out taken off for each round that waited as long", otherwise, "1"),
        *(Row(f"{waited}, {name}", [e.waited for e in arm], "0") for name, arm in arms),
        *(Row(f"rounds a second, {name}", [e.pace for e in arm], "") for name, arm in arms),
        *(
            Row(f"honest peers end equal, {name}", [e.equal for e in arm], "1", least, judged="least")
            for name, arm in arms
        ),
        Row("honest peers that learned all rounds", [e.whole for e in hard], "1", least, judged="least"),
        *(Row(f"rounds without some honest peer, {name}", [e.alone for e in arm], "0") for name, arm in arms),
        *(Row(f"{late}, {name}", [e.arrival_s for e in arm], "") for name, arm in arms),
    ]


@contextmanager
def bucket() -> Iterator[str]:
    """A bucket on a server of this process, configured through the environment that the peers inherit."""
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


def stressed(board: str, rounds: int, timeout_s: float, seed: int, harsh: bool) -> SwarmConfig:
    withholding = {"attack": {"kind": "text", "dose": 0.0, "withhold": 0.5}}
    plain: dict[str, Any] = {
        "name": "swarm_stress",
        "board": board,
        "seed": seed,
        "size": 6,
        "policy": {"model": {"dim": 32, "hidden": 64}},
        "warmup": {"steps": 150, "lr": 0.01, "noise": 0.05, "stray_letter_probability": 0.0},
        "rounds": {"count": rounds, "prompts": 4, "group": 12, "timeout_s": timeout_s, "keep": 2},
        "evaluate": {"every": 0, "problems": 2},
        "peers": {WITHHOLDS: withholding} if harsh else {},
    }
    return SwarmConfig.model_validate(plain)


def arm(place: str, args: Any, seed: int, harsh: bool) -> Ended:
    config = stressed(f"{place}/{uuid.uuid4().hex}", args.rounds, args.timeout, seed, harsh)
    found(config, args.identities if harsh else 0, args.senders)
    with tempfile.TemporaryDirectory() as folder:
        live = LiveSwarm(config, Path(folder))
        try:
            began = time.time()
            for name in peer_names(config):
                live.start(name)
            if harsh:
                killed(live, random.Random(seed))
            wait_until(
                "further round",
                lambda: all(len(done(live.folder, name)) == args.rounds for name in peer_names(config)),
                LONGEST_S,
            )
            for process in live.processes.values():
                process.join(30)
        finally:
            live.stop()
        return judged(live.folder, config, began)


def found(config: SwarmConfig, identities: int, senders: int) -> None:
    """Create the run on its board with fake identities, the first of which have sent for every round."""
    from planaria.swarm.config.swarm_recipe import run_rules

    run = Board(config.board, PeerIdentity.generate()).create_run(run_rules(config, make_task(config))).run
    crowd = [PeerIdentity.generate() for _ in range(identities)]
    files = [
        file for n, who in enumerate(crowd) for file in fake_files(who, run, config.rounds.count if n < senders else 0)
    ]
    if files:
        import s3fs

        system = s3fs.S3FileSystem()
        with ThreadPoolExecutor(4) as several:
            list(several.map(lambda file: system.pipe_file(f"{config.board}/{file[0]}", file[1]), files))


def fake_files(who: PeerIdentity, run: str, rounds: int) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a fake identity: a greeting, and per round a message without completions."""
    folder, tokenizer = f"peers/{who.peer}", "00" * 8
    hello = Hello(run=run, peer=who.peer, key=who.public.hex(), name="x", tokenizer=tokenizer, model="x", joined=0)
    yield f"{folder}/hello.json", seal(who, hello)
    for number in range(rounds):
        message = Rollouts(run=run, peer=who.peer, round=number, tokenizer=tokenizer, weights="", groups=())
        yield f"{folder}/{message.place}", seal(who, message)


def killed(live: LiveSwarm, draw: random.Random) -> None:
    """Kill two peers at random moments; restart each when the others are a round further."""
    rounds = live.config.rounds.count
    for nth, name in enumerate(KILLED):
        after = 1 + nth * rounds // 3 + draw.randrange(0, max(1, rounds // 4))
        wait_until("further round", lambda name=name, after=after: len(done(live.folder, name)) >= after, LONGEST_S)  # type: ignore[misc]
        time.sleep(draw.uniform(0, 1))
        live.processes[name].signal(signal.SIGKILL)
        live.processes[name].join(10)
        before = len(done(live.folder, UNTOUCHED))
        wait_until("further round", lambda before=before: len(done(live.folder, UNTOUCHED)) > before, LONGEST_S)  # type: ignore[misc]
        live.start(name)


def judged(folder: Path, config: SwarmConfig, began: float) -> Ended:
    honest = [name for name in peer_names(config) if name != WITHHOLDS]
    started = {
        name: next(r for r in read_log(folder / PEERS / name / LOG) if isinstance(r, PeerStarted)) for name in honest
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


BEHIND = (0, 1, 4, 8)
EVERY = 8
CLAIMS = {0: Claim(high=0.0), 8: Claim(high=0.03)}
ELSEWHERE = 1000  # what is added to the seed of another warm-up


@benchmark("swarm_checks", seeds=[1, 2, 3], rounds=Flag(40, "that the policy learns for"))
def run_swarm_checks(args: Namespace) -> Measurement:
    """Measure how often likelihood checks refuse honest completions.

    A policy learns alone. Every eighth round, versions of it that are 0, 1, 4 and 8 rounds newer read its completions,
    as a peer that many rounds ahead would. Completions of a policy from another warm-up follow; they must switch the
    check off. One value per seed.
    """
    found = [dict(measured(seed, args.rounds)) for seed in args.seeds]
    rows = [
        Row(what, [of_seed[what] for of_seed in found], "", claim_of(what))
        for what in dict.fromkeys(what for of_seed in found for what in of_seed)
    ]
    return Result(rows, ["measured: share refused; off: 1 if the layer switched itself off"])


def claim_of(what: str) -> Claim | None:
    """Only the support check has claims."""
    check, _, case = what.partition(", ")
    if check != "support":
        return None
    if case == "another warm-up":
        return Claim(low=0.2)
    if case == "another warm-up: off":
        return Claim(low=1.0)
    return CLAIMS.get(int(case.split()[0]))


def measured(seed: int, rounds: int) -> Iterator[tuple[str, float]]:
    """Yield the share that each check refused in each case."""
    from planaria.swarm.checks import make_checks as made

    torch.set_num_threads(1)
    config = SwarmConfig(
        seed=seed,
        warmup=SupervisedWarmupConfig(stray_letter_probability=0.1, seed=seed),
        sampling=SamplingConfig(top_k=6),
    )
    task = make_task(config)
    past = history(config, task, make_policy(config, task), rounds)
    context = Context(task, seed, config.sampling.support(past[0].vocab), past[0].vocab)
    checks = made(config.defence.model_copy(update={"checks": "support, surprisal, duplicates"}))
    looks = range(EVERY, rounds + 1, EVERY)
    for behind in BEHIND:
        cases = [c for now in looks for c in sent(config, task, past[now], past[now - behind], now, "p1")]
        yield from refusals(checks, context, cases, f"{behind} rounds behind")
    elsewhere = config.model_copy(update={"warmup": config.warmup.model_copy(update={"seed": seed + ELSEWHERE})})
    other = make_policy(elsewhere, task)
    cases = [c for peer in ("p1", "p2", "p3") for c in sent(config, task, other, past[0], 0, peer)]
    yield from refusals(checks, context, cases, "another warm-up")
    report = Defence(config.defence, checks, context).examine(0, cases)
    for check in checks:
        yield f"{check.name}, another warm-up: off", float(check.name in report.off)


def refusals(
    checks: Sequence[Check], context: Context, cases: Sequence[Rollout], who: str
) -> Iterator[tuple[str, float]]:
    for check in checks:
        yield f"{check.name}, {who}", len(check.examine(cases, context).rejected) / len(cases)


def history(config: SwarmConfig, task: Task, policy: Policy, rounds: int) -> list[Policy]:
    """Return the policy at the start and after each round of learning alone."""
    alone, past = Shadow(config, "p0", task, policy), [policy.clone()]
    for number in range(rounds):
        chosen = shared_problems(config.seed, number, task.training, config.rounds.prompts)
        alone.run_round(number, [prompt_for(task.problem(n), policy) for n in chosen], config.rounds.group)
        past.append(alone.learner.policy.clone())
    return past


def sent(config: SwarmConfig, task: Task, writer: Policy, reader: Policy, number: int, name: str) -> list[Rollout]:
    """Return a round of complete completions by ``writer``, read by ``reader``."""
    chosen = shared_problems(config.seed + 1, number, task.training, config.rounds.prompts)
    author = Author(config, name, task, writer)
    written = [
        replace(rollout, peer=name, round=number, index=index)
        for rollouts in author.write(number, [prompt_for(task.problem(n), writer) for n in chosen], config.rounds.group)
        for index, rollout in enumerate(rollouts)
        if rollout.ended
    ]
    return read_rollouts(reader, written, config.sampling)


RANK = 4
ATTACKS = {
    "TEXT": {"kind": "text", "options": {"payload": "q "}},
    "TEXT, tokens forged": {"kind": "text", "options": {"payload": "q "}, "claims": "forged_tokens"},
    "MATH": {"kind": "math"},
    "STYLE": {"kind": "style"},
    "SABOTAGE, first letters": {"kind": "sabotage", "options": {"steps": "first"}},
    "SABOTAGE, last digits": {"kind": "sabotage"},
}


@benchmark("swarm_unlike", seeds=[1, 2, 3], rounds=Flag(6, "that the policy learns for"))
def run_swarm_unlike(args: Namespace) -> Measurement:
    """Measure which layers stay on between peers with slightly different weights, and what they stop.

    A policy learns alone, then reads one round of itself, two honest peers and an attacker. These three have its
    weights but for one difference. Defaults of the defence, one round, nothing learned from it; one value per seed. An
    attack's phrase is a stray letter that the policy has seen, as in the drills.
    """
    found = [dict(unlike_shares(seed, args.rounds)) for seed in args.seeds]
    rows = [Row(what, [of_seed[what] for of_seed in found if what in of_seed], "") for what in found[0]]
    note = "shares of a round; off: 1 if the layer switched itself off"
    return Result(rows, [note])


def unlike_shares(seed: int, rounds: int) -> Iterator[tuple[str, float]]:
    torch.set_num_threads(1)
    base = {
        "seed": seed,
        "warmup": {"steps": 2000, "noise": 0.3, "stray_letter_probability": 0.3, "seed": seed},
        "optim": {"lr": 2e-3},
    }
    config = SwarmConfig.model_validate(base | {"sampling": {"top_k": 6}})
    task = make_task(config)
    past = history(config, task, make_policy(config, task), rounds)
    warmup = config.warmup.model_copy(update={"seed": seed % 3 + 1})
    others = {
        "equal weights": past[-1],
        "weights rounded to bf16": altered(past[-1], past[0], lambda now, _: now.bfloat16().float()),
        f"update of rank {RANK}": altered(past[-1], past[0], cut),
        "one round behind": past[-2],
        "another warm-up": make_policy(config.model_copy(update={"warmup": warmup}), task),
    }
    for what, other in others.items():
        honest = work(config, task, past[-1], other, rounds)
        for attack in ATTACKS:
            sent_too = poison(config, task, past[-1], other, attack, rounds)
            yield from layer_shares(f"{what}, {attack}", examined(config, task, past[-1], [*honest, *sent_too], rounds))


def altered(policy: Policy, begun: Policy, change: Callable[[Tensor, Tensor], Tensor]) -> Policy:
    copy = policy.clone()
    with torch.no_grad():
        for mine, then in zip(copy.module.parameters(), begun.module.parameters(), strict=True):
            mine.copy_(change(mine, then))
    return copy


def cut(now: Tensor, then: Tensor) -> Tensor:
    """Return ``then`` plus the best approximation of rank :data:`RANK` of the update, for matrices."""
    if now.dim() != 2:
        return now
    left, strengths, right = torch.linalg.svd(now - then, full_matrices=False)
    learned: Tensor = (left[:, :RANK] * strengths[:RANK]) @ right[:RANK]
    return then + learned


def work(config: SwarmConfig, task: Task, reader: Policy, other: Policy, number: int) -> list[Rollout]:
    """Return the completions of honest peers: p0 with the reader's policy, p1 and p2 with the other."""
    found = []
    for peer, writer in (("p0", reader), ("p1", other), ("p2", other)):
        found += [
            replace(c, declares_same_weights=writer is reader) for c in sent(config, task, writer, reader, number, peer)
        ]
    return [replace(c, reward=scored(task, c)) for c in found]


def examined(config: SwarmConfig, task: Task, reader: Policy, cases: list[Rollout], number: int) -> DefenceReport:
    from planaria.swarm.checks import make_checks

    context = Context(task, config.seed, config.sampling.support(reader.vocab), reader.vocab)
    return Defence(config.defence, make_checks(config.defence), context).examine(number, cases)


def poison(config: SwarmConfig, task: Task, reader: Policy, other: Policy, attack: str, number: int) -> list[Rollout]:
    """Return the poisoned completions of an attacker with the weights of ``other``, read by ``reader``."""
    given = config.model_dump() | {"attack": ATTACKS[attack]}
    author = Attacker(type(config).model_validate(given), "p3", task, other)
    asked = [prompt_for(task.problem(n), other) for n in author.choose(number, config.rounds.prompts)]
    count = config.rounds.group // config.size
    written = [w for group in author.write(number, asked, count) for w in group if w.poison]
    alike = other is reader
    return [
        replace(w, peer="p3", index=n, round=number, declares_same_weights=alike, reward=scored(task, w))
        for n, w in enumerate(read_rollouts(reader, written, config.sampling))
    ]


def scored(task: Task, rollout: Rollout) -> float:
    return task.score(rollout.problem, rollout.text) if rollout.ended else 0.0


def layer_shares(what: str, report: DefenceReport) -> Iterator[tuple[str, float]]:
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
