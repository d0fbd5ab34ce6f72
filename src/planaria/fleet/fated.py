"""Imported by a nursery's fork server before all else: it is killed with the nursery, and its workers with it.

By itself it would hear the same news from a pipe, and then take a second to leave, as any program does that has torch
imported.
"""

from __future__ import annotations

from planaria.fleet.birth import die_with_parent

die_with_parent()
