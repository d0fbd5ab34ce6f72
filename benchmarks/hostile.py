"""What does planaria do with recipes, flags, topologies, traces and schedules that are meant to break it?

Every case is one command, in this process: it may be taken or refused, but it must answer; a refusal is exit code 2 and
one line. No traceback, no answer later than 5 s from a `--dry-run`, nothing left in the folder of runs by what was
refused.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.command import carry_out
from benchmarks.common import Claim, Row, conclude, parser, start
from benchmarks.hostile_cases import Case, cases, prepare

NAME = "hostile"
DRY_S = 5.0


def verdict(case: Case, home: Path, limit_s: float = 30.0) -> tuple[str, float, str]:
    """(what is wrong with how a case ended, or nothing; its seconds; what it said)."""
    before = _there(home)
    said = carry_out(case.arguments(home), limit_s)
    answer = said.err.strip().splitlines()[-1] if said.err.strip() else ""
    left = _there(home) - before
    if said.code == -2:
        return "no answer", said.seconds, answer
    if said.code not in (0, 2) or "Traceback" in said.err:
        return "traceback", said.seconds, answer
    if said.code == 2 and not said.kind:
        return "not one line", said.seconds, said.err[:400]
    if case.refused and said.code == 0:
        return "taken", said.seconds, said.out[:200]
    if said.code == 2 and left:
        return "left something", said.seconds, str(sorted(left)[0])
    return "", said.seconds, answer


def _there(home: Path) -> set[str]:
    """What runs have left."""
    return {str(path) for path in (home / "none").rglob("*")}


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seed", type=int, default=34107)
    flags.add_argument("--values", type=int, default=3, help="for each field of a recipe")
    flags.add_argument("--verbose", action="store_true", help="print what each case said")
    flags.add_argument("--only", default="", help="cases with this in their name")
    given = flags.parse_args()
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        prepare(home)
        found, wrong, slowest = (
            [c for c in cases(home, given.seed, given.values) if given.only in c.name],
            Counter[str](),
            0.0,
        )
        for case in found:
            why, seconds, said = verdict(case, home)
            if "--dry-run" in case.words:
                slowest = max(slowest, seconds)
            wrong[why] += 1
            if why or given.verbose or seconds > DRY_S:
                print(f"{why or 'right':14} {seconds:4.1f} s  {case.name}: {said[:300]}", flush=True)
    rows = [
        Row("cases", [len(found)], "", Claim(low=300)),
        Row("tracebacks", [wrong["traceback"]], "0", Claim(high=0)),
        Row("no answer", [wrong["no answer"]], "0", Claim(high=0)),
        Row("taken, though wrong", [wrong["taken"]], "0", Claim(high=0)),
        Row("refused, but not in one line", [wrong["not one line"]], "0", Claim(high=0)),
        Row("refused, with something left behind", [wrong["left something"]], "0", Claim(high=0)),
        Row("slowest --dry-run, s", [slowest], f"{DRY_S:g}", Claim(high=DRY_S)),
    ]
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    start(main)
