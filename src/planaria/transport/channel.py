"""A connection that has proved the run's key, as bytes in and bytes out: plain on this machine, TLS beyond it.

One thread may read while another writes, and closing a channel wakes both.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import threading
import time
from typing import Protocol

from planaria.transport.secure import stays_here

_RECORD = 1 << 14
"""bytes of a TLS record; OpenSSL takes and gives one at a time"""
_SLICE_S = 1.0
SILENT_PEER_S = 60
"""what was sent and nobody has acknowledged for so long breaks the connection: a host that vanishes says nothing"""


class Closed(Exception):
    """The other end has closed the channel, or vanished."""


class Channel(Protocol):
    """What edges and control lines are built on."""

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` (bytes), waiting for as long as it takes.

        :raises Closed: when the other end has closed.
        :raises OSError: when the connection breaks.
        """
        ...

    def write(self, *views: memoryview) -> None:
        """Send these views (bytes), one after the other, waiting for as long as it takes.

        :raises OSError: when the connection breaks, or is closed here.
        """
        ...

    def write_now(self, first: memoryview, second: memoryview) -> int:
        """Send as much of these two as there is room for; how many bytes. Never waits.

        :raises OSError: as :meth:`write`.
        """
        ...

    def close(self) -> None:
        """Close; threads that wait on the channel get an error."""
        ...


class Plain:
    """A channel between processes of one machine."""

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(True)
        self._raw = raw

    def read_into(self, view: memoryview) -> None:
        while view:
            got = self._raw.recv_into(view, len(view), socket.MSG_WAITALL)
            if not got:
                raise Closed("closed by the other end")
            view = view[got:]

    def write(self, *views: memoryview) -> None:
        sent = self._raw.sendmsg(views)
        for view in views:
            self._raw.sendall(view[sent:])
            sent = max(0, sent - len(view))

    def write_now(self, first: memoryview, second: memoryview) -> int:
        try:
            return self._raw.sendmsg([first, second], (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may be broken already
            self._raw.shutdown(socket.SHUT_RDWR)
        self._raw.close()


class Secured:
    """A channel between machines. OpenSSL allows one thread at a time, and none of them waits inside it."""

    def __init__(self, tls: ssl.SSLSocket) -> None:
        tls.setblocking(False)
        self._tls, self._turn = tls, threading.Lock()

    def fileno(self) -> int:
        return self._tls.fileno()

    def read_some(self, view: memoryview) -> int | None:
        """Read what is there, at most ``view``; None when nothing is.

        :raises Closed: when the other end has closed.
        :raises OSError: when the connection breaks.
        """
        with self._turn:
            try:
                got = self._tls.recv_into(view)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return None
            except ssl.SSLEOFError:
                raise Closed("the connection broke off") from None
        if not got:
            raise Closed("closed by the other end")
        return got

    def read_into(self, view: memoryview) -> None:
        while view:
            got = self.read_some(view)
            if got is None:
                self.wait(select.POLLIN)
            else:
                view = view[got:]

    def write(self, *views: memoryview, patience_s: float | None = None) -> None:
        """As :meth:`Channel.write`; TimeoutError when nothing could be sent for ``patience_s``."""
        for view in views:
            while view:
                sent = self._write_some(view)
                if not sent and not self.wait(select.POLLOUT, patience_s):
                    raise TimeoutError(f"nothing could be sent for {patience_s:g} s")
                view = view[sent:]

    def write_now(self, first: memoryview, second: memoryview) -> int:
        return 0  # encrypting is work for the thread that sends

    def _write_some(self, view: memoryview) -> int:
        with self._turn:
            try:
                return self._tls.send(view[:_RECORD])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return 0

    def wait(self, what: int, patience_s: float | None = None) -> bool:
        """Wait until the socket can be read or written; False when that took longer than ``patience_s``.

        :raises OSError: when it is closed here.
        """
        until = math.inf if patience_s is None else time.monotonic() + patience_s
        while (left := until - time.monotonic()) > 0:
            if (handle := self._tls.fileno()) < 0:
                raise OSError("closed here")
            poll = select.poll()
            poll.register(handle, what)
            # In slices: between the look and the wait another thread may close the socket.
            if poll.poll(1000 * min(left, _SLICE_S)):
                return True
        return False

    def hang_up(self) -> None:
        """End the connection; :meth:`close` is still to come."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)  # its own method would forget that there was TLS

    def close(self) -> None:
        self.hang_up()
        self._tls.close()


def keep_alive(tls: ssl.SSLSocket) -> None:
    """Have the system notice that the other end's host has vanished, also while nobody sends."""
    if tls.family != socket.AF_UNIX:
        tls.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 3)):
            tls.setsockopt(socket.IPPROTO_TCP, option, seconds)
        tls.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_PEER_S)


def channel(tls: ssl.SSLSocket) -> Plain | Secured:
    """What two ends that have proved the key to each other go on with; both call this at the same point.

    :raises OSError: when the connection breaks.
    """
    keep_alive(tls)
    if not stays_here(tls):
        return Secured(tls)
    tls.unwrap()
    return Plain(socket.socket(fileno=tls.detach()))
