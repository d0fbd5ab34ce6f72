"""A comparison as a table for a paper."""

from __future__ import annotations

import re

from planaria.lab.compare.race_results import Compared
from planaria.lab.report.comparison_table import columns, rows

_SPECIAL = re.compile(r"[&%$#_{}~^\\]")
_WORDS = {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}


def latex(found: Compared) -> str:
    """A ``tabular`` of the columns that the terminal shows, mean [least … most] over the seeds; needs ``booktabs``."""
    head, *below = (" & ".join(map(escaped, row)) + r" \\" for row in [columns(found), *rows(found)])
    body = "\n".join([r"\toprule", head, r"\midrule", *below, r"\bottomrule"])
    return f"\\begin{{tabular}}{{l{'r' * head.count(' & ')}}}\n{body}\n\\end{{tabular}}\n"


def escaped(text: str) -> str:
    """Text as LaTeX prints it, whatever an arm is called."""
    safe = _SPECIAL.sub(lambda found: _WORDS.get(found[0], "\\" + found[0]), text)
    return safe.replace("×", r"$\times$").replace("…", r"\dots{}").replace("–", "--")
