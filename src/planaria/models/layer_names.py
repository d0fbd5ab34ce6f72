"""Names of parameters that tell which decoder layer they belong to."""

from __future__ import annotations

import re

LAYER = re.compile(r"(?:.*\.)?layers\.\d+(?=\.)")
"""prefix of the names of a decoder layer's parameters"""
