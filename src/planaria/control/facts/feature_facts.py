"""Registration of the events, reports and orders of features that own a package.

The unions in ``events.py``, ``reports.py`` and ``decisions.py`` include them from here. To add or remove a feature,
change this module, ``feature_state.py``, ``features.py``, ``runtime/worker/step_work.py`` and
``report/run/features.py``.
"""

from __future__ import annotations

from planaria.exchange.coded.facts import CloseRound, ResultsSent, RoundLate

FeatureReport = ResultsSent
FeatureEvent = ResultsSent | RoundLate
FeatureOrder = CloseRound
HIDDEN_FACTS = ResultsSent, RoundLate, CloseRound
"""those that the live page does not show"""
