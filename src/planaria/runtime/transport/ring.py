"""Shared memory for tensors between processes of one machine.

A process that sends large tensors owns a ring: slots of equal size in an anonymous file (``memfd_create``), which
exists as long as a process maps it. The two ends of an edge exchange descriptors when they connect (``secure.py``). A
frame then names a slot instead of carrying its payload (``wire.py``), and the receiver reads the slot in place.

The first page has one byte per slot. The owner sets it to a ticket when it shares the slot; the receiver clears it, if
it still holds that ticket, when it no longer uses the tensor. A slot whose edge was closed meanwhile is free after
:data:`GRACE_S`. After the owner's death the receiver's mapping remains valid.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from planaria.runtime.transport.wire import TensorHeader, WireError

MAX_SLOTS, MAX_BYTES = 255, 64 << 30
"""limits of a ring; a slot's number and its ticket are one byte each of a frame's header"""
GRACE_S = 30.0
"""seconds before a slot is reused whose edge closed while it was shared, since its receiver may be reading"""
_PAGE = mmap.PAGESIZE
_SIZES = struct.Struct("<QQ")
"""number of slots, bytes per slot"""
_MAPPED, _NOT_MAPPED = b"\x01", b"\x00"

PageLock = Callable[[int, int], Callable[[], None]]
"""page-locks memory, given its address and size, and returns a function that unlocks it"""


class RingSize(NamedTuple):
    slots: int
    slot_bytes: int

    @property
    def whole(self) -> int:
        """Bytes of the whole file."""
        return _PAGE + self.slots * self.slot_bytes


class SharedSlot(NamedTuple):
    """A slot as a frame names it, counted from 1, and the ticket under which it is shared."""

    slot: int
    ticket: int


class _Pages:
    """A mapping of a ring."""

    def __init__(self, fd: int, size: RingSize, lock: PageLock | None) -> None:
        self.size, self.map = size, mmap.mmap(fd, size.whole)
        self.first = ctypes.addressof(ctypes.c_char.from_buffer(self.map)) + _PAGE
        self._lock, self._locked = lock, set[int]()

    def lock(self, slot: int) -> None:
        """Page-lock a slot, once."""
        if self._lock is not None and slot not in self._locked:
            self._locked.add(slot)
            weakref.finalize(self, self._lock(self.first + slot * self.size.slot_bytes, self.size.slot_bytes))

    def tensor(self, slot: int, size: int, released: Callable[[SharedSlot], None], ticket: int) -> Tensor:
        """Return a slot as uint8 [size]; call ``released`` when the tensor's memory is no longer used."""
        self.lock(slot)
        lease = (ctypes.c_char * size).from_buffer(self.map, _PAGE + slot * self.size.slot_bytes)
        weakref.finalize(lease, released, SharedSlot(slot + 1, ticket)).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)


class Ring:
    """The ring that this process owns. Methods are thread-safe."""

    def __init__(self, slots: int, slot_bytes: int, lock: PageLock | None = None) -> None:
        """Reserve and page-lock the memory; OSError if there is too little memory."""
        self.size = RingSize(min(slots, MAX_SLOTS), -(-slot_bytes // _PAGE) * _PAGE)
        if self.size.whole > (free := available()):
            raise OSError(errno.ENOMEM, f"{free / 1e6:,.0f} MB of memory are available")
        self.fd = os.memfd_create("planaria-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        os.posix_fallocate(self.fd, 0, self.size.whole)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _seals())
        self._pages = _Pages(self.fd, self.size, lock)
        for slot in range(self.size.slots):
            self._pages.lock(slot)
        self._allocated = set[int]()
        self._tickets = [0] * self.size.slots
        self._expiring = dict[int, tuple[int, float]]()
        """slot → its ticket, and monotonic seconds from which it is free even if its byte is set"""
        self._changing = threading.Lock()

    def allocate(self, size: int) -> Tensor | None:
        """Return a free slot as uint8 [size], or None if all are in use or too small."""
        if not 0 < size <= self.size.slot_bytes:
            return None
        with self._changing:
            for slot in range(self.size.slots):
                if slot not in self._allocated and self._free(slot):
                    self._allocated.add(slot)
                    return self._pages.tensor(slot, size, self._release_slot, 0)
        return None

    def _free(self, slot: int) -> bool:
        """Return whether a slot is not shared, or its grace period is over."""
        current = self._pages.map[slot]
        ticket, until = self._expiring.get(slot, (current, math.inf))
        if current and (ticket != current or time.monotonic() < until):
            return False
        self._expiring.pop(slot, None)
        self._pages.map[slot] = 0
        return True

    def _release_slot(self, share: SharedSlot) -> None:
        """Mark a slot as unused by this process. Runs in any thread at any time, so it takes no lock."""
        self._allocated.discard(share.slot - 1)

    def share(self, tensor: Tensor) -> SharedSlot | None:
        """Share the slot in which a contiguous tensor begins; return None if it is in no slot, or already shared."""
        if tensor.is_cuda or not tensor.is_contiguous():
            return None
        slot, beyond = divmod(tensor.data_ptr() - self._pages.first, self.size.slot_bytes)
        if beyond or not 0 <= slot < self.size.slots or not 0 < tensor.nbytes <= self.size.slot_bytes:
            return None
        with self._changing:
            if self._pages.map[slot]:
                return None
            self._tickets[slot] = self._tickets[slot] % 255 + 1
            self._pages.map[slot] = self._tickets[slot]
            return SharedSlot(slot + 1, self._tickets[slot])

    def shared(self, share: SharedSlot) -> bool:
        """Return whether the slot is still shared under this ticket."""
        return self._pages.map[share.slot - 1] == share.ticket

    def expire(self, share: SharedSlot) -> None:
        """Reuse the slot after :data:`GRACE_S`, because its edge was closed."""
        with self._changing:
            if self.shared(share):
                self._expiring[share.slot - 1] = share.ticket, time.monotonic() + GRACE_S


class RingReader:
    """A mapping of another process's ring."""

    def __init__(self, fd: int, size: RingSize, lock: PageLock | None = None) -> None:
        """Map the ring. Slots are page-locked at their first use: all at the start would delay a recovery.

        :raises OSError: if the file is not a sealed ring of this size.
        """
        status = os.fstat(fd)
        if not (0 < size.slots <= MAX_SLOTS and size.slot_bytes > 0 and size.whole <= MAX_BYTES):
            raise OSError(f"a ring of {size.slots} slots of {size.slot_bytes} bytes")
        if not stat.S_ISREG(status.st_mode) or status.st_size != size.whole:
            raise OSError(f"a ring of {status.st_size} bytes, not {size.whole}")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _seals() != _seals():
            raise OSError("a ring that could shrink")
        self._pages = _Pages(fd, size, lock)

    def tensor(self, header: TensorHeader) -> Tensor:
        """Return the tensor that a frame describes; its slot is free when the tensor's memory is no longer used.

        :raises WireError: if the slot does not exist, is too small, or is not shared under the frame's ticket.
        """
        slot, size = header.slot - 1, self._pages.size
        if not 0 <= slot < size.slots or not 0 < header.nbytes <= size.slot_bytes:
            raise WireError(f"frame {header.shape} cannot be in slot {header.slot} of {size}")
        if not header.ticket or self._pages.map[slot] != header.ticket:
            raise WireError(f"slot {header.slot} of a ring is not shared under ticket {header.ticket}")
        content = self._pages.tensor(slot, header.nbytes, self._release, header.ticket)
        return content.view(header.dtype).view(header.shape)

    def _release(self, share: SharedSlot) -> None:
        if self._pages.map[share.slot - 1] == share.ticket:
            self._pages.map[share.slot - 1] = 0


class Rings:
    """The ring that this process owns, if any, and the rings that it reads; each is mapped once."""

    def __init__(self, own: Ring | None = None, lock: PageLock | None = None) -> None:
        self.own, self._lock = own, lock
        self._readers: weakref.WeakValueDictionary[tuple[int, int], RingReader] = weakref.WeakValueDictionary()
        self._mapping = threading.Lock()

    def exchange(self, local_socket: socket.socket) -> tuple[Ring | None, RingReader | None]:
        """Exchange descriptors over a Unix socket; return our ring if the other end has mapped it, and the other's.

        If a step fails or times out, that direction uses the socket.
        """
        reader: RingReader | None = None
        try:
            self._send(local_socket)
            reader = self._receive(local_socket)
            local_socket.sendall(_NOT_MAPPED if reader is None else _MAPPED)
            return (self.own if local_socket.recv(1) == _MAPPED else None), reader
        except OSError:
            return None, reader

    def _send(self, local_socket: socket.socket) -> None:
        if self.own is None:
            local_socket.sendall(_SIZES.pack(0, 0))
        else:
            socket.send_fds(local_socket, [_SIZES.pack(*self.own.size)], [self.own.fd])

    def _receive(self, local_socket: socket.socket) -> RingReader | None:
        raw, fds, _, _ = socket.recv_fds(local_socket, _SIZES.size, 1)
        try:
            if not fds or len(raw) != _SIZES.size:
                return None
            status = os.fstat(fds[0])
            key = status.st_dev, status.st_ino
            with self._mapping:
                reader = self._readers.get(key)
                if reader is None:
                    reader = RingReader(fds[0], RingSize(*_SIZES.unpack(raw)), self._lock)
                    self._readers[key] = reader
                return reader
        except (OSError, ValueError):
            return None
        finally:
            for fd in fds:
                os.close(fd)


def available() -> float:
    """Return the available memory in bytes, without swapping; infinite if the system does not report it.

    The system would kill processes to reserve more.
    """
    try:
        report = Path("/proc/meminfo").read_text()
        return 1024.0 * int(report.split("MemAvailable:")[1].split()[0])
    except (OSError, IndexError, ValueError):
        return math.inf


def _seals() -> int:
    """Return the seals that prevent a shrinking file, which would kill its reader (SIGBUS)."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
