"""A thousand random faults, over all strategies and exchanges: nothing hangs, no sample is lost or used twice.

Many small runs of `planaria train`, each drawn from the seed: its recovery strategy or exchange, routing and options,
its trace of faults of all kinds at all moments, alone, in pairs, and at those who help in a recovery; besides, blows
from outside at random moments: at workers by their process ids, and at the controller, after which the run is resumed.
Each is judged by what it leaves: every sample used exactly once in the history it ends with, says planaria's own ledger
and says a second one that shares no line with it (`second_ledger.py`); it ended, and what it refused it refused in one
line that the faults explain; no process is left 15 s after any end, no traceback, no half of a file, and its
checkpoints can be read and are finite.

A campaign is kept in runs/benchmarks/campaign/seed-N: the same command goes on where it was stopped, the table counts
all that was found so far, and a run of which something is wrong stays there as it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.campaign_plan import SPECIES, SWITCHES, Plain, draw
from benchmarks.common import ROOT, RUNS, Claim, Row, conclude, parser, start, write

NAME = "campaign"


class Campaign:
    """One seed's runs: those that are judged, and the next ones."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self._next, self._drawing = 0, threading.Lock()
        self.over = threading.Event()
        self.text = folder / "lines.txt"
        write(self.text, "".join(f"line {n} of many; its square is {n * n}\n" for n in range(1000)))

    def plan(self, number: int) -> Plain:
        given = self.given
        return draw(given.seed, number, given.without, given.faults_a_run, given.only or SPECIES)

    def verdict(self, number: int) -> Plain | None:
        """Of a run that was judged before, unless its plan has become another."""
        path = self.folder / f"run-{number:04d}" / "verdict.json"
        verdict: Plain | None = json.loads(path.read_text()) if path.exists() else None
        return verdict if verdict is not None and verdict["plan"] == digest(self.plan(number)) else None

    def judged(self) -> list[Plain]:
        """All verdicts so far, in order of number."""
        numbers = sorted(int(path.parent.name[4:]) for path in self.folder.glob("run-*/verdict.json"))
        return [verdict for number in numbers if (verdict := self.verdict(number)) is not None]

    def struck(self) -> int:
        return sum(map(faults_of, self.judged()))

    def sit(self) -> float:
        """Make runs until there are enough faults, or the time is over; the seconds that it took."""
        began = time.monotonic()
        with ThreadPoolExecutor(self.given.runs_at_a_time) as pool:
            sitting = [pool.submit(self._work, began) for _ in range(self.given.runs_at_a_time)]
            try:
                for one in sitting:
                    one.result()
            finally:
                self.over.set()  # Ctrl-C: runs under way end, and are made again next time
        return time.monotonic() - began

    def _work(self, began: float) -> None:
        while not self.over.is_set() and time.monotonic() - began < 60 * self.given.minutes:
            number = self._draw_number()
            if number is None:
                return
            if (verdict := self._make(number)) is not None:
                print(told(verdict), flush=True)

    def _draw_number(self) -> int | None:
        with self._drawing:
            if self.struck() >= self.given.faults:
                return None
            while self.verdict(self._next) is not None:
                self._next += 1
            self._next += 1
            return self._next - 1

    def _make(self, number: int) -> Plain | None:
        from benchmarks.campaign_runs import carry_out
        from benchmarks.campaign_verdict import judge

        plan, folder = self.plan(number), self.folder / f"run-{number:04d}"
        data = {"source": str(self.text), "tokenizer": "bytes", "cache": str(self.folder / "cache")}
        made = carry_out(folder, plan, data, self.given.hang_s, self.over)
        if made is None:
            return None
        verdict = judge(*made) | {"plan": digest(plan)}
        write(folder / "verdict.json", json.dumps(verdict, indent=1) + "\n")
        return verdict


def digest(plan: Plain) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def faults_of(verdict: Plain) -> int:
    """Those of the trace that struck, and blows from outside."""
    return sum(Counter[str](verdict["faults"]).values()) + sum(Counter[str](verdict["outside"]).values())


def told(verdict: Plain) -> str:
    """One line for each run that is over; more if something is wrong."""
    line = (
        f"run {verdict['number']}, {verdict['species']}: {verdict['outcome']}, {faults_of(verdict)} faults, "
        f"{verdict['parts']} parts, {len(verdict['refusals'])} refusals, {verdict['blocks']} blocks, "
        f"{verdict['seconds']:.0f} s"
    )
    return "\n   WRONG: ".join([line, *verdict["wrong"]])


def summed(verdicts: Sequence[Plain], key: str) -> Counter[str]:
    return sum((Counter(verdict[key]) for verdict in verdicts), Counter())


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"


def rows_of(given: argparse.Namespace, verdicts: Sequence[Plain], minutes: float) -> list[Row]:
    total, blocks = sum(map(faults_of, verdicts)), sum(verdict["blocks"] for verdict in verdicts)
    met = len({verdict["species"] for verdict in verdicts})
    unexplained = [verdict for verdict in verdicts if verdict["wrong"]]

    def number(key: str) -> list[float]:
        return [float(sum(verdict[key] for verdict in verdicts))]

    hangs = float(sum(verdict["outcome"] == "hung" for verdict in verdicts))
    return [
        Row("faults that struck", [total], f"{len(verdicts)} runs", Claim(low=given.faults)),
        Row("strategies and exchanges met", [met], f"{len(set(SPECIES))} there are", None),
        Row("hangs", [hangs], "0", Claim(high=0)),
        Row("blocks of samples lost", number("lost"), f"0 of {blocks}", Claim(high=0)),
        Row("blocks used twice", number("repeated"), f"0 of {blocks}", Claim(high=0)),
        Row("processes left 15 s after an end", number("orphans"), "0", Claim(high=0)),
        Row("runs of which anything is wrong", [len(unexplained)], "0, unexplained ends among them", Claim(high=0)),
        Row("longest until no process was left, s", [v["slowest_end_s"] for v in verdicts], "0", None, {}, "worst"),
        Row("minutes in all", [minutes], f"{given.runs_at_a_time} runs at a time", Claim(high=90.0)),
    ]


def notes_of(verdicts: Sequence[Plain], folder: Path) -> list[str]:
    by_moment: dict[str, Counter[str]] = {}
    for what, count in summed(verdicts, "faults").items():
        signal, _, moment = what.partition(" ")
        by_moment.setdefault(signal, Counter())[moment] += count
    refusals = Counter(reason.replace("\n", " ")[:160] for verdict in verdicts for reason in verdict["refusals"])
    return [
        *(f"{signal}: {listed(moments)}" for signal, moments in sorted(by_moment.items())),
        f"from outside: {listed(summed(verdicts, 'outside'))}",
        f"formations: {listed(summed(verdicts, 'formed'))}",
        f"deaths by: {listed(summed(verdicts, 'deaths'))}",
        f"runs: {listed(Counter(verdict['species'] for verdict in verdicts))}",
        f"processes of controllers: {sum(verdict['parts'] for verdict in verdicts)}, "
        f"{sum(verdict.get('from_memory', 0) for verdict in verdicts)} of them resumed from memory",
        f"refusals, each with its reason: {sum(refusals.values())}",
        *(f"   {count} × {reason}" for reason, count in refusals.most_common(12)),
        *(f"WRONG in run {verdict['number']}: {what[:300]}" for verdict in verdicts for what in verdict["wrong"]),
        f"kept in {folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder.name}",
    ]


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument(
        "--faults", type=int, default=1000, help="that are to strike, those of earlier sittings included"
    )
    flags.add_argument("--minutes", type=float, default=90.0, help="of this sitting, runs under way excepted")
    flags.add_argument("--runs-at-a-time", type=int, default=2)
    flags.add_argument("--faults-a-run", type=int, default=28, help="about so many in each trace")
    flags.add_argument("--hang-s", type=float, default=240.0, help="a run hangs that does not get on for so long")
    flags.add_argument("--without", nargs="*", default=[], choices=SWITCHES, metavar="KIND", help=" ".join(SWITCHES))
    flags.add_argument(
        "--only", nargs="*", default=[], choices=sorted(set(SPECIES)), metavar="RUN", help="a strategy or exchange"
    )
    flags.add_argument("--folder", type=Path, default=RUNS / NAME, help="where campaigns are kept")
    given = flags.parse_args()
    campaign = Campaign(given, (given.folder / f"seed-{given.seed}").absolute())
    sittings = campaign.folder / "minutes.json"
    before = json.loads(sittings.read_text()) if sittings.exists() else []
    before.append(campaign.sit() / 60)
    write(sittings, json.dumps(before))
    verdicts = campaign.judged()
    return conclude(NAME, given, rows_of(given, verdicts, sum(before)), notes_of(verdicts, campaign.folder))


if __name__ == "__main__":
    start(main)
