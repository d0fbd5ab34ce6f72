"""What benchmarks of gradient coding share: delays, patterns, processes that sleep their load, deaths."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from benchmarks.common import Claim, Row

if TYPE_CHECKING:
    from planaria.exchange.coded.base import Late, Scheme
    from planaria.exchange.coded.simulate import Profile


def bursts(
    rounds: int,
    n: int,
    seed: int,
    *,
    enter: float = 0.04,
    leave: float = 0.9,
    times: tuple[float, float] = (4.0, 6.0),
    fixed: float = 0.2,
    per_load: float | None = None,
) -> Profile:
    """Gilbert–Elliott: a worker becomes slow with chance ``enter`` a round and well again with ``leave``.

    A round takes ``fixed`` + ``per_load`` · L seconds, with per_load = n unless given, up to 5 % more, and for a slow
    worker some number of ``times`` as long.
    """
    import numpy as np

    from planaria.exchange.coded.simulate import Profile

    draw, slow, per = np.random.default_rng(seed), np.zeros(n, dtype=bool), float(n if per_load is None else per_load)
    seconds = np.empty((rounds, n))
    for now in range(rounds):
        slow = np.where(slow, draw.random(n) >= leave, draw.random(n) < enter)
        lag = np.where(slow, draw.uniform(*times, n), 1.0)
        seconds[now] = (fixed + per / n) * lag * draw.uniform(1.0, 1.05, n)
    return Profile(seconds, 1 / n, per)


def best(n: int, published: bool, **kind: Any) -> dict[str, Scheme]:
    """Of each name the scheme that is quickest on a probe of 80 rounds."""
    from planaria.exchange.coded.choose import grid
    from planaria.exchange.coded.simulate import replay

    probe, found = bursts(80, n, 100, **kind), {}
    for name, scheme in grid(n, published=published):
        seconds = replay(scheme, probe, 80, published=published).seconds
        found[name] = min(found.get(name, (float("inf"), scheme)), (seconds, scheme), key=lambda pair: pair[0])
    return {name: scheme for name, (_, scheme) in found.items()}


def some_scheme(kind: str, n: int, rng: random.Random) -> Scheme:
    """With any parameters that are allowed."""
    from planaria.exchange.coded import SCHEMES

    if kind == "gc":
        return SCHEMES.make(kind, {"stragglers": rng.randint(0, n - 1)})
    burst, late = rng.randint(1, 3), rng.choice([*range(n), n, n])
    window = burst * rng.randint(1, 3) + 1 if kind == "srsgc" else burst + rng.randint(1, 2)
    return SCHEMES.make(kind, {"burst": burst, "window": window, "stragglers": late})


def pattern(scheme: Scheme, n: int, jobs: int, rng: random.Random, waited_out: bool) -> list[Late]:
    """Random late workers of all rounds; waited out, only as many as leave the published patterns."""
    history: list[Late] = []
    share = rng.choice([0.1, 0.3, 0.6])
    for _ in range(jobs + scheme.delay()):
        busy = scheme.busy(n, jobs, history)
        late = [worker for worker in range(n) if busy[worker] and rng.random() < share]
        rng.shuffle(late)
        while waited_out and not scheme.conforms(n, [*history, frozenset(late)]):
            late.pop()
        history.append(frozenset(late))
    return history


def gradients(count: int) -> Any:
    """Real ones, of a small net on batches of its own: [count, d] in fp32."""
    import torch

    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4))
    found = []
    for _ in range(count):
        inputs = torch.randn(4, 16)
        loss = torch.nn.functional.cross_entropy(net(inputs), (inputs[:, :4].argmax(1) + 1) % 4)
        found.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(net.parameters()))]))
    return torch.stack(found)


def effective(scheme: Scheme, n: int, jobs: int) -> list[Row]:
    """The load of a window when nobody is late, as a share of a step's data, over its published L (J + T) / J."""
    from planaria.exchange.coded.simulate import replay

    even, stated = bursts(1, n, 1, enter=0.0), scheme.load(n) * (jobs + scheme.delay()) / jobs
    charged = replay(scheme, even, jobs, published=True).work / jobs
    computed = replay(scheme, even, jobs).work / jobs
    what = f"windows: n = {n}, {jobs} jobs, load"
    return [
        Row(f"{what} charged / stated", [charged / stated], f"L (J + T) / J = {stated:.4f}", Claim(0.99, 1.01)),
        Row(f"{what} computed / stated", [computed / stated], "mini-tasks of no job are not run"),
    ]


def with_deaths(
    scheme_of: Callable[[int], Scheme],
    profile: Profile,
    jobs: int,
    deaths: Mapping[int, Sequence[int]],
    restart_s: float,
) -> float:
    """Seconds for the jobs when workers die for good and the scheme goes on with those who are left.

    A death is noticed at its round's deadline. It costs ``restart_s`` and the jobs under way, but for those of plain
    codes, which bear it in that round.
    """
    import numpy as np

    from planaria.exchange.coded.base import NOBODY
    from planaria.exchange.coded.simulate import replay

    living, done, at, spent = list(range(profile.workers)), 0, 0, 0.0
    for now in sorted(deaths):
        n, scheme = len(living), scheme_of(len(living))
        rest = profile.without([worker for worker in range(profile.workers) if worker not in living])
        spent += sum(replay(scheme, rest, jobs - done, start=at).rounds[: now - at])
        counts = np.array(scheme.busy(n, jobs, [NOBODY] * (scheme.delay() + 1)))
        deadline = 2.0 * float(rest.at(now, counts * scheme.load(n) / scheme.slots()).min())
        spent += deadline + restart_s
        borne = not scheme.delay() and scheme.bears(n, 1, [frozenset([0])])
        done += max(0, now - at - scheme.delay()) + borne
        living, at = [worker for worker in living if worker not in deaths[now]], now + 1
    rest = profile.without([worker for worker in range(profile.workers) if worker not in living])
    return spent + replay(scheme_of(len(living)), rest, jobs - done, start=at).seconds


# ---- processes


@dataclass(frozen=True)
class Slept:
    """How jobs went with real processes."""

    seconds: float
    decoded: int
    late: int


def sleeper(pipe: Connection) -> None:
    """Sleep as long as an order says, then say so; a new order ends the sleep, None all."""
    order: tuple[int, float] | None = pipe.recv()
    while order is not None:
        number, seconds = order
        if pipe.poll(seconds):
            order = pipe.recv()
            continue
        pipe.send(number)
        order = pipe.recv()


def sleep_jobs(scheme: Scheme, profile: Profile, jobs: int, scale: float, slow: float = 2.0) -> Slept:
    """The jobs with one process a worker, each of which sleeps ``scale`` times what the profile says for its load."""
    n, context = profile.workers, get_context("spawn")
    pairs = [context.Pipe() for _ in range(n)]
    workers = [context.Process(target=sleeper, args=(theirs,), daemon=True) for _, theirs in pairs]
    for worker in workers:
        worker.start()
    pipes = [ours for ours, _ in pairs]
    try:
        for pipe in pipes:  # all are up
            pipe.send((-1, 0.0))
        for pipe in pipes:
            pipe.recv()
        return _rounds(scheme, profile, jobs, scale, slow, pipes)
    finally:
        for pipe in pipes:
            pipe.send(None)
        for worker in workers:
            worker.join(10)


def _rounds(scheme: Scheme, profile: Profile, jobs: int, scale: float, slow: float, pipes: list[Connection]) -> Slept:
    import numpy as np

    n, history, decoded = profile.workers, list[Any](), 0
    each, patience = scheme.load(n) / scheme.slots(), slow if scheme.delay() else 1.0
    began = time.monotonic()
    for now in range(jobs + scheme.delay()):
        counts = scheme.busy(n, jobs, history)
        busy = {worker for worker in range(n) if counts[worker]}
        seconds, start = profile.at(now, each * np.array(counts)), time.monotonic()
        for worker in busy:
            pipes[worker].send((now, scale * float(seconds[worker])))
        history.append(_awaited(scheme, jobs, history, pipes, busy, now, start, patience))
        if 0 <= (job := now - scheme.delay()) < jobs:
            decoded += scheme.decode(n, history, job) is not None
    return Slept(time.monotonic() - began, decoded, sum(len(late) for late in history))


def _awaited(
    scheme: Scheme,
    jobs: int,
    history: list[Late],
    pipes: list[Connection],
    busy: set[int],
    now: int,
    start: float,
    patience: float,
) -> Late:
    """Who is late in a round: hear workers until all are there, or the deadline is over and the rest may be late."""
    missing, deadline = set(busy), float("inf")
    while missing:
        left = max(0.0, deadline - time.monotonic())
        if not left and scheme.bears(len(pipes), jobs, [*history, frozenset(missing)]):
            break
        of = {pipes[worker]: worker for worker in missing}
        for pipe in wait(list(of), timeout=None if deadline == float("inf") or not left else left):
            assert isinstance(pipe, Connection)
            if pipe.recv() == now:
                missing.discard(of[pipe])
                deadline = min(deadline, start + patience * (time.monotonic() - start))
    return frozenset(missing)
