"""Resource limits of the live page."""

from __future__ import annotations

MAX_RUNS = 8
"""maximum runs on one page"""

MAX_FRAMES = 6_000
"""maximum frames kept per run; older ones that change only numbers are joined"""
FULL_DETAIL = 1_000
"""newest frames that are never joined"""
MAX_LOST = 12
"""maximum lost workers shown; the others are only counted"""

POLL_S = 0.2
"""polling interval of a log"""
MAX_BATCH = 200
"""maximum frames per message"""
KEEP_ALIVE_S = 10.0
"""keep-alive interval of a stream"""
READY_S = 60.0
"""maximum age of the newest fact of a ready run"""

MAX_CONNECTIONS = 128
"""maximum connections; beyond that, a new one replaces the one idle for longest"""
MAX_STREAMS = 64
"""maximum simultaneous watchers"""
MAX_TARGET = 512
"""maximum characters of a path and its query"""
MAX_HEAD = 16 << 10
"""maximum bytes of a request's headers"""
MAX_BODY = 1 << 10
"""maximum bytes of a request to inject a fault"""
REQUEST_TIMEOUT_S = 10.0
"""timeout of a request after the connection opens"""
SEND_TIMEOUT_S = 20.0
"""timeout of a reader that does not receive"""
SHUTDOWN_S = 3.0
"""time to send the last frames when the server stops"""
