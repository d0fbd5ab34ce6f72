"""A comparison as a table for a paper."""

from __future__ import annotations

import re

from planaria.compare.race_results import Compared, Scored
from planaria.observe.trials.comparison import COLUMNS, cells

_SPECIAL = re.compile(r"[&%$#_{}~^\\]")
_WORDS = {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}


def latex(found: Compared) -> str:
    """A ``tabular`` of the columns that the terminal shows, mean [least … most] over the seeds; needs ``booktabs``."""
    head = " & ".join(map(escaped, ["arm", *COLUMNS]))
    rows = [_row(arm) for arm in found.ranked()]
    body = "\n".join([r"\toprule", head + r" \\", r"\midrule", *rows, r"\bottomrule"])
    return f"\\begin{{tabular}}{{l{'r' * len(COLUMNS)}}}\n{body}\n\\end{{tabular}}\n"


def _row(arm: Scored) -> str:
    return " & ".join(map(escaped, cells(arm))) + r" \\"


def escaped(text: str) -> str:
    """Text as LaTeX prints it, whatever an arm is called."""
    safe = _SPECIAL.sub(lambda found: _WORDS.get(found[0], "\\" + found[0]), text)
    return safe.replace("×", r"$\times$").replace("…", r"\dots{}").replace("–", "--")
