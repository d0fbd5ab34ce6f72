"""The built-in matrix ``twelve_cities``: measured links between twelve regions of one cloud (SkipPipe and CheckFree).

One-way latency in milliseconds, bandwidth in the published unit: a thousandth of 8 GiB/s, about 1.07 Mbit/s.
"""

from __future__ import annotations

SITES = (
    "Belgium",
    "Canada",
    "Germany",
    "Iowa",
    "Japan",
    "Los Angeles",
    "Netherlands",
    "Oregon",
    "Singapore",
    "Taiwan",
    "London",
    "Australia",
)
UNIT_BYTES = 2**30 / 8000
"""bytes per second of one unit of bandwidth"""

# Row i: from site i to sites i+1, i+2, …
# Netherlands-London is published as 1.9, ten thousandth of what all other pairs of north-western Europe have as a
# thousandth (1510 to 1940): a slip of the decimal point, by which one message would take 132 s. A later publication
# of the same matrix has 189, again a tenth; 1940 is what the neighbours have.
_LINKS = """
41/159 4/1940 49/227 112/94 70/155 3/1940 66/167 83/129 105/100 3.5/1940 129/79
44/255 14/605 74/145 35/244 42/200 30.5/377 107/96 89/118 38.5/291 98/105
53.5/213 112/89 73/146 3.5/1940 68/119 80/100 102/101 6.6/1510 125.5/84
72.5/112 23.4/492 51/219 19.3/723 101.5/101 88/102 48.1/175 84/90
50/222 108.5/91 46.2/244 35.6/312 19.2/614 107/71 58/110
71.5/114 12.4/948 79.5/135 64/130 68/119 69/117
67/163 81.5/131 105.5/96 4.8/1940 128/76
78.5/134 59.5/187 64/170 68/117
23.2/495 85/125 48/238
109.5/72 67/168
132/75
"""


def links() -> dict[tuple[str, str], tuple[float, float]]:
    """(site, later site) → (latency in seconds, bandwidth in bytes per second)."""
    found = {}
    for i, row in enumerate(_LINKS.split("\n")[1:-1]):
        for other, cell in zip(SITES[i + 1 :], row.split(), strict=True):
            latency, bandwidth = map(float, cell.split("/"))
            found[SITES[i], other] = (latency / 1000, bandwidth * UNIT_BYTES)
    return found
