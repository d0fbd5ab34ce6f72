"""An authenticated connection as a byte stream: plain text within one host, TLS between hosts.

One thread may read while another writes; closing a channel wakes both.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod

from torch import Tensor

from planaria.runtime.transport.ring import Ring, RingReader, Rings, SharedSlot
from planaria.runtime.transport.secure import cut_off, meet_here
from planaria.runtime.transport.wire import TensorHeader, WireError

_RECORD = 1 << 14
"""bytes of a TLS record; OpenSSL returns one at a time"""
_PIECE = 8 * _RECORD
_AT_ONCE = 1 << 20
"""bytes per encryption"""
_WORTH_READING = 1 << 17
"""least bytes of a large frame to wake up for; fewer would cost more than reading them"""
_SLICE_S = 1.0
SILENT_PEER_S = 60
"""seconds without acknowledgement after which the connection breaks, since a vanished host sends nothing"""


class ChannelClosed(Exception):
    """The other end has closed the channel, or vanished."""


class Channel(ABC):
    """The connection of an edge. Methods do not block, except for another thread's call."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end, self._threshold = end, 1

    def fileno(self) -> int:
        """Return the descriptor for polling."""
        return self._end.fileno()

    @abstractmethod
    def read_some(self, view: memoryview) -> int | None:
        """Read at most ``view`` (bytes); return None if there is no data.

        :raises ChannelClosed: if the other end has closed.
        :raises OSError: if the connection breaks.
        """

    def expect(self, size: int) -> None:
        """Set the least number of bytes still to come, so that polling need not report each part."""
        threshold = _WORTH_READING if size >= _WORTH_READING else 1
        if threshold != self._threshold:
            self._end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, threshold)
            self._threshold = threshold

    def unseen(self) -> bool:
        """Return whether data was taken from the socket but not read; polling does not report it."""
        return False

    @abstractmethod
    def write_some(self, view: memoryview, then: memoryview) -> int:
        """Send as much of both (bytes) as possible; return the number of bytes.

        :raises OSError: if the connection breaks, or is closed here.
        """

    def share(self, tensor: Tensor) -> SharedSlot | None:
        """Share the slot of this process's ring that holds a tensor, if the other end can read it."""
        return None

    def shared(self, header: TensorHeader) -> Tensor:
        """Return the tensor of a frame that names a slot of the other end's ring.

        :raises WireError: if the other end shares no such slot.
        """
        raise WireError(f"a frame names slot {header.slot} of a ring that is not shared")

    def expire(self) -> None:  # noqa: B027 (only channels with a ring have slots)
        """Release shared slots after a while, read or not, because the edge was abandoned."""

    @abstractmethod
    def shut_down(self) -> None:
        """Shut the connection down for both ends; :meth:`close` must follow."""

    @abstractmethod
    def close(self) -> None: ...


class LocalChannel(Channel):
    """A channel between processes of one machine; large tensors may be in shared memory."""

    def __init__(self, raw: socket.socket, ring: Ring | None = None, theirs: RingReader | None = None) -> None:
        """``ring``: this process's, if the other end reads it; ``theirs``: the other end's."""
        super().__init__(raw)
        self._ring, self._theirs = ring, theirs
        self._shares = dict[int, SharedSlot]()

    def read_some(self, view: memoryview) -> int | None:
        try:
            got = self._end.recv_into(view)
        except BlockingIOError:
            return None
        if not got:
            raise ChannelClosed("closed by the other end")
        return got

    def write_some(self, view: memoryview, then: memoryview) -> int:
        try:
            return self._end.sendmsg((view, then))
        except BlockingIOError:
            return 0

    def share(self, tensor: Tensor) -> SharedSlot | None:
        share = None if self._ring is None else self._ring.share(tensor)
        if share is not None:
            self._shares[share.slot] = share
        return share

    def shared(self, header: TensorHeader) -> Tensor:
        return super().shared(header) if self._theirs is None else self._theirs.tensor(header)

    def expire(self) -> None:
        for share in list(self._shares.values()):
            if self._ring is not None:
                self._ring.expire(share)

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):  # already broken
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()
        self._end.close()
        self.expire()


class SecureChannel(Channel):
    """A channel between machines. OpenSSL allows one thread at a time; no call blocks inside it."""

    def __init__(self, tls: ssl.SSLSocket) -> None:
        super().__init__(tls)
        self._tls = tls
        self._turn = threading.Lock()

    def read_some(self, view: memoryview) -> int | None:
        with self._turn:
            try:
                got = self._tls.recv_into(view)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return None
            except ssl.SSLEOFError:
                raise ChannelClosed("the connection was lost") from None
        if not got:
            raise ChannelClosed("closed by the other end")
        return got

    def expect(self, size: int) -> None:
        super().expect(size - _RECORD)  # OpenSSL may hold a part of the next record

    def unseen(self) -> bool:
        with self._turn:
            return self._tls.pending() > 0

    def write(self, *views: memoryview, patience_s: float | None = None) -> None:
        """Send these views (bytes) in order, waiting for room.

        :raises TimeoutError: if nothing can be sent for ``patience_s``.
        :raises OSError: if the connection breaks, or is closed here.
        """
        for view in views:
            while view:
                sent = self._write_some(view)
                if not sent and not wait_for(self, select.POLLOUT, patience_s):
                    raise TimeoutError(f"nothing could be sent for {patience_s:g} s")
                view = view[sent:]

    def write_some(self, view: memoryview, then: memoryview) -> int:
        """Send as :meth:`Channel.write_some`, but only a part of a large one, since encryption takes time.

        A header and the start of its payload are one record, which halves the system calls of a small frame.
        """
        sent = 0
        if 0 < len(view) < _RECORD and then:
            sent = self._write_some(memoryview(b"".join((view, then[: _RECORD - len(view)]))))
            if not sent:
                return 0
            view, then = view[sent:], then[max(0, sent - len(view)) :]
        for rest in (view, then):
            while rest and sent < _AT_ONCE:
                sent += (size := self._write_some(rest))
                if not size:
                    return sent
                rest = rest[size:]
        return sent

    def _write_some(self, view: memoryview) -> int:
        with self._turn:
            try:
                # After a failed send, OpenSSL requires a retry with the same data.
                return self._tls.send(view[:_PIECE])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return 0

    def shut_down(self) -> None:
        cut_off(self._tls)

    def close(self) -> None:
        self.shut_down()
        self._tls.close()


def wait_for(end: Channel, event: int, patience_s: float | None = None) -> bool:
    """Wait until a channel is readable (POLLIN) or writable (POLLOUT); return False after ``patience_s``.

    :raises OSError: if it is closed here.
    """
    until = math.inf if patience_s is None else time.monotonic() + patience_s
    while (remaining_s := until - time.monotonic()) > 0:
        if (handle := end.fileno()) < 0:
            raise OSError("closed here")
        poll = select.poll()
        poll.register(handle, event)
        # In slices, because another thread may close the socket before the poll.
        if poll.poll(1000 * min(remaining_s, _SLICE_S)):
            return True
    return False


def keep_alive(tls: ssl.SSLSocket) -> None:
    """Let the system detect that the other end's host has vanished, even without traffic."""
    if tls.family != socket.AF_UNIX:
        tls.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 3)):
            tls.setsockopt(socket.IPPROTO_TCP, option, seconds)
        tls.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_PEER_S)


def channel(tls: ssl.SSLSocket, rings: Rings | None = None) -> LocalChannel | SecureChannel:
    """Return the channel with which an authenticated connection continues; both ends call this at the same point.

    The connection's timeout limits the other end's part. ``rings``: of this process.
    :raises OSError: if the connection breaks.
    """
    keep_alive(tls)
    local_socket = meet_here(tls)
    if local_socket is None:
        return SecureChannel(tls)
    with local_socket:
        local_socket.settimeout(tls.gettimeout())
        exchanged = (rings or Rings()).exchange(local_socket)
    tls.unwrap()
    return LocalChannel(socket.socket(fileno=tls.detach()), *exchanged)
