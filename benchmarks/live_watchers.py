"""What do watchers of the live page cost a run? Step times with no page, with one watcher, and with twenty.

The same small run is trained on the fleet in turns: without a page, and with one that is served by a process of its
own, as `planaria train --live` starts it, and read by one or by twenty watchers in another process. Compared are the
medians of the steps' times. The claim: at most 1.01 of the time without.

Steps vary by more than that from run to run, so the processor time that the page took is claimed too: less than a
hundredth of all cores' over the run. It is what a machine without an idle core cannot do otherwise meanwhile. Watchers
run at the lowest priority, since real ones are on other machines.
"""

from __future__ import annotations

import http.client
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from benchmarks.common import Claim, Row, conclude, interleaved, milliseconds, parser, start
from benchmarks.fleet_run import add_model_flags, real_stages, require_finished, run_fleet, step_seconds
from benchmarks.worker_cpu import cpu_seconds

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig
    from planaria.control.protocols import Observer

NAME = "live_watchers"
CLAIM, SHARE = Claim(high=1.01), Claim(high=0.01)
END_S = 30.0


def read(url: str, watchers: int) -> None:
    """So many watchers, who read and forget until the server ends."""
    parts = urlsplit(url)
    token = parse_qs(parts.query)["token"][0]
    os.nice(19)

    def one() -> None:
        line = http.client.HTTPConnection(parts.hostname or "", parts.port)
        line.request("GET", "/api/runs/0/frames", headers={"authorization": f"Bearer {token}"})
        answer = line.getresponse()
        while answer.read1(1 << 16):
            pass

    threads = [threading.Thread(target=one) for _ in range(watchers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def watched(folder: Path, watchers: int, shares: list[float]) -> Iterator[None]:
    """The page of a run and its watchers; ``shares`` gets what the page took of all cores in the meantime."""
    from planaria.cli.commands.watch import beside
    from planaria.report.live_page.serving import Address

    said: list[str] = []
    with beside(folder, Address(), None, False, said.append) as page:
        began, before = time.monotonic(), cpu_seconds([page.pid])
        url = said[0].split()[-1]
        words = [sys.executable, "-m", f"benchmarks.{NAME}", "--read", url, str(watchers)]
        readers = subprocess.Popen(words)
        yield
        took, lasted = cpu_seconds([page.pid]) - before, time.monotonic() - began
        shares.append(took / lasted / len(os.sched_getaffinity(0)))
    readers.wait(END_S)


def step_s(config: RunConfig, watchers: int, warm: int, shares: list[float]) -> float:
    """Seconds of a step, the median; ``shares`` as in :func:`watched`."""
    with ExitStack() as beside:

        def around(inner: Observer, folder: Path) -> Observer:
            if watchers:
                beside.enter_context(watched(folder, watchers, shares))
            return inner

        record = run_fleet(config, around=around)
    require_finished(record)
    return statistics.median(step_seconds(record, warm))


def main() -> int:
    flags = parser(NAME, __doc__)
    add_model_flags(flags)
    flags.add_argument("--steps", type=int, default=150, help="in one repeat")
    flags.add_argument("--warm", type=int, default=20, help="the first of these, which do not count")
    flags.add_argument("--repeats", type=int, default=7, help="of each side")
    flags.add_argument("--watchers", type=int, nargs="+", default=[1, 20])
    given = flags.parse_args()
    config = real_stages(given, NAME, given.steps, spares=1, save_every=0)
    counts = [0, *given.watchers]
    shares: dict[int, list[float]] = {count: [] for count in counts}
    sides = [lambda n=count: step_s(config, n, given.warm, shares[n]) for count in counts]
    alone, *others = interleaved(sides, given.repeats)
    rows = []
    for count, found in zip(given.watchers, others, strict=True):
        ratios = [with_page / without for with_page, without in zip(found, alone, strict=True)]
        beside = {"without": milliseconds(alone), "with": milliseconds(found)}
        who = f"{count} watcher{'s' * (count > 1)}"
        rows.append(Row(who, ratios, "1", CLAIM, beside))
        rows.append(Row(f"{who}: processor time of the page, of all cores'", shares[count], "0", SHARE))
    return conclude(NAME, given, rows, ["measured: median time of a step with the page / without"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2], int(sys.argv[3]))
    else:
        start(main)
