"""What does planaria do with a run of which one file is damaged, altered or gone?

Small real runs; of each case's copy one file is damaged in one way, and one command is given it, in this process. What
the command needs and a digest covers must be refused: exit code 2, one line that names the file, nothing changed in the
folder. Logs, which no digest covers, may be read where what is left of them are whole lines. No traceback, ever.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.command import carry_out
from benchmarks.common import Claim, Row, conclude, parser, start
from benchmarks.damage_cases import Case, cases, copied, prepare

NAME = "damage"


def verdict(case: Case, home: Path, place: Path, seed: int) -> tuple[str, str]:
    """(how it ended, what was said): refused, not read, read (a log) or what is wrong with it."""
    folder = copied(home, case, place)
    case.damage(folder, random.Random(f"{seed} {case.name}"))
    before = _there(folder)
    said = carry_out(case.arguments(folder), 60)
    answer = said.err.strip()[-300:]
    if said.code == -2:
        return "no answer", answer
    if said.code == 1 and case.command == "replay" and case.log:
        return "refused", answer  # the log does not explain the run, which is what replay is there to say
    if said.code not in (0, 2) or "Traceback" in said.err:
        return "traceback", answer
    if said.code == 0:
        return ("read" if case.log else "believed" if case.read else "not read"), answer
    if not said.kind:
        return "not one line", answer
    if Path(case.file).name not in said.err and Path(case.file).parent.name not in said.err:
        return "not named", answer
    return ("refused", answer) if _there(folder) == before else ("left something", answer)


def _there(folder: Path) -> dict[str, tuple[int, int]]:
    """The files of a folder, their sizes and times; a lock is no content."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seed", type=int, default=34107)
    flags.add_argument("--cases", type=int, default=900, help="of about two thousand")
    flags.add_argument("--only", default="", help="cases with this in their name")
    given = flags.parse_args()
    with tempfile.TemporaryDirectory() as place:
        home, ended = Path(place) / "runs", Counter[str]()
        home.mkdir()
        prepare(home)
        found = [case for case in cases(home, given.seed) if given.only in case.name][: given.cases]
        for case in found:
            how, said = verdict(case, home, Path(place) / "run", given.seed)
            ended[how] += 1
            if how not in ("refused", "not read", "read"):
                print(f"{how:14} {case.name}: {said}", flush=True)
    wrong = {
        "traceback": "tracebacks",
        "no answer": "no answer",
        "believed": "damage believed",
        "not one line": "refused, but not in one line",
        "not named": "refused without the file's name",
        "left something": "refused, with something changed",
    }
    rows = [Row("cases", [len(found)], "", Claim(low=500))]
    rows += [Row(what, [ended[how]], "0", Claim(high=0)) for how, what in wrong.items()]
    told = {
        "refused": "refused in one line",
        "not read": "not read by the command",
        "read": "logs read, as far as whole",
    }
    rows += [Row(what, [ended[how]], "") for how, what in told.items()]
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    start(main)
