"""Everything that is bounded about the live page, in one place: what a stranger or a long run may cost."""

from __future__ import annotations

MOST_RUNS = 8
"""runs side by side on one page"""

MOST_FRAMES = 6_000
"""of a run's story that are kept; of older ones, those in which nothing but numbers change are joined"""
FULL_DETAIL = 1_000
"""newest frames that are never joined"""
MOST_LOST = 12
"""workers that were lost and not started anew, shown at most; the others are counted"""

POLL_S = 0.2
"""between two looks at a log"""
BATCH = 200
"""frames sent in one message"""
QUIET_S = 10.0
"""after which a stream says that it is there"""
READY_S = 60.0
"""the newest fact of a run that is ready is no older"""

MOST_CONNECTIONS = 128
"""at a time; beyond that, a new one replaces the one that has been idle for longest"""
MOST_STREAMS = 64
"""watchers at a time"""
LONGEST_TARGET = 512
"""characters of a path and its query"""
LARGEST_HEAD = 16 << 10
"""bytes of a request's headers"""
LARGEST_BODY = 1 << 10
"""bytes of an order to inject a fault"""
ASK_S = 10.0
"""a connection has so long to make its request"""
STUCK_S = 20.0
"""a reader that takes in nothing for so long is dropped"""
LEAVE_S = 3.0
"""for the last frames to reach their watchers when the server ends"""
