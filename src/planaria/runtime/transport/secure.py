"""Authenticate both ends of a connection by the run's key, before anything else is read or sent.

Both ends hold the same 32 random bytes. An Ed25519 key pair and its self-signed certificate follow from them, the same
in every process of the run, and TLS 1.3 demands that certificate of both ends: a stranger cannot finish the handshake.
Traffic between hosts stays inside TLS. Between processes of one host, edges continue in plain text after the handshake,
because encryption would cost more than the transfer; :func:`meet_here` decides, by proof. See docs/limits.md for
the threat model.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
import os
import secrets
import socket
import ssl
import struct
import time
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from planaria.common.errors import UserError

KEY_BYTES = 32
NO_PROC = "/proc/self/fd: missing, and connections between workers need it; mount /proc, or train with --engine inline"
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "planaria")])
_FROM, _UNTIL = datetime.datetime(2020, 1, 1), datetime.datetime(9999, 12, 31)
"""a run's key lives as long as the run; clocks of strangers' machines may be wrong"""
_NONCE_BYTES = 32
_NO_OFFER = bytes(_NONCE_BYTES)
"""in place of a nonce: the connection stays inside TLS"""
_MET, _APART = b"\x01", b"\x00"
_MEETING_S = 1.0
"""a connection within one kernel succeeds or fails at once"""
_GUESTS = 8
"""at a meeting, strangers included"""
_CREDENTIALS = struct.Struct("iII")
"""``struct ucred``: process, user, group"""


class StrangerError(Exception):
    """The other end has not proved the run's key."""


def new_key() -> bytes:
    """A key for a run."""
    return secrets.token_bytes(KEY_BYTES)


@lru_cache(maxsize=8)
def _contexts(key: bytes) -> tuple[ssl.SSLContext, ssl.SSLContext, bytes]:
    """The contexts of the calling and the called end, and the certificate (DER) that both must show."""
    seed = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=b"planaria tls identity 1").derive(key)
    private = Ed25519PrivateKey.from_private_bytes(seed)
    built = x509.CertificateBuilder(_NAME, _NAME, private.public_key(), 1, _FROM, _UNTIL)
    # Ed25519 signatures are deterministic: every process makes the same certificate, byte for byte.
    certificate = built.sign(private, None)
    pem = certificate.public_bytes(Encoding.PEM)
    secret = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    calling, called = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in (calling, called):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate names the run, not a machine
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=pem.decode())
        _load(context, pem + secret)
    called.num_tickets = 0  # nobody resumes a session
    return calling, called, certificate.public_bytes(Encoding.DER)


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Give a context its certificate and key, which OpenSSL reads from files only: this one is in memory."""
    handle = os.memfd_create("planaria", os.MFD_CLOEXEC)
    try:
        os.write(handle, pem)
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    except FileNotFoundError:
        raise UserError(NO_PROC) from None
    finally:
        os.close(handle)


def prepare(key: bytes) -> None:
    """Make what handshakes need now, so that the first one is as quick as the others."""
    _contexts(key)


def begin(raw: socket.socket, key: bytes, calling: bool) -> ssl.SSLSocket:
    """``raw``, which is spent, with TLS about to begin on it: nothing has been read or sent yet."""
    client, server, _ = _contexts(key)
    with contextlib.suppress(OSError):  # a Unix socket has no such delay
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return (client if calling else server).wrap_socket(
        raw, server_side=not calling, do_handshake_on_connect=False, suppress_ragged_eofs=False
    )


def prove(tls: ssl.SSLSocket, key: bytes, seconds: float) -> None:
    """Prove the key to the other end and have it proved, in so many seconds.

    A calling end may be through before the other has judged it: it knows only when the first word comes back.

    :raises StrangerError: when the other end cannot, or not in time.
    :raises OSError: when the connection breaks.
    """
    tls.settimeout(seconds)
    try:
        tls.do_handshake()
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # who does not know the key is told so, not hung up on
        raise ConnectionAbortedError("it hung up while the key was being proved") from None
    except ssl.SSLError as error:
        raise StrangerError(f"it does not know the run's key ({error.reason or 'no handshake'})") from None
    except TimeoutError:
        raise StrangerError(f"it has not proved the run's key in {seconds:g} s") from None
    if tls.getpeercert(binary_form=True) != _contexts(key)[2]:
        raise StrangerError("it shows another certificate than the run's")


def read_exactly(tls: ssl.SSLSocket, count: int, until: float = math.inf) -> bytes:
    """Read ``count`` bytes, each piece within the socket's timeout, or all ``until`` then (monotonic seconds).

    :raises OSError: when the other end hangs up, or takes longer.
    """
    got = b""
    while len(got) < count:
        if until < math.inf:
            tls.settimeout(max(0.001, until - time.monotonic()))
        if not (more := tls.recv(count - len(got))):
            raise ConnectionError("it hung up")
        got += more
    return got


def cut_off(tls: ssl.SSLSocket) -> None:
    """End a connection for both ends; threads that wait for it find out, and it is still to be closed."""
    with contextlib.suppress(OSError):  # it may be broken already
        socket.socket.shutdown(tls, socket.SHUT_RDWR)  # its own method would forget that there was TLS


def meet_here(tls: ssl.SSLSocket) -> socket.socket | None:
    """Return a Unix socket to the other end if both are processes of one user in one network namespace, without a
    forwarder between them; else None.

    Both ends of an authenticated connection call this at the same point and get the same answer. Addresses alone prove
    nothing: with a forwarder on each host's loopback, ends on two hosts see equal ones. So the called end listens on a
    Unix socket with an abstract name, and the calling end has to reach it. Such names exist within one network
    namespace of one kernel. The name is the digest of a nonce, sent inside TLS, and of both addresses as each end sees
    them: a forwarder between the ends changes the addresses, and the name with them. Each end also requires that
    its own user is at the other, so that another user who has seen the name cannot take its place. Whatever fails, the
    answer is no.

    :raises OSError: when the connection breaks, or the other end takes longer than the socket's timeout.
    """
    return _offer_meeting(tls) if tls.server_side else _attend_meeting(tls)


def _offer_meeting(tls: ssl.SSLSocket) -> socket.socket | None:
    """The called end's part: listen, send the nonce, and read whether the other end got through."""
    nonce, here, there = secrets.token_bytes(_NONCE_BYTES), *_ends(tls)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        try:
            if here[0] != there[0]:  # spares ends on two hosts a round trip
                raise OSError("another host")
            listening.bind(_meeting_name(nonce, there, here))
            listening.listen(_GUESTS)
        except OSError:
            tls.sendall(_NO_OFFER)
            return None
        tls.sendall(nonce)
        met = _accepted(listening) if read_exactly(tls, 1) == _MET else None
        # Confirm: strangers may have filled the queue before the other end.
        tls.sendall(_MET if met is not None else _APART)
        return met


def _accepted(listening: socket.socket) -> socket.socket | None:
    """Return the first connection of this user."""
    listening.settimeout(_MEETING_S)
    for _ in range(_GUESTS + 1):  # Linux queues one connection beyond the backlog
        try:
            guest, _ = listening.accept()
        except OSError:
            break
        if _of_this_user(guest):
            return guest
        guest.close()
    return None


def _attend_meeting(tls: ssl.SSLSocket) -> socket.socket | None:
    """The calling end's part: read the nonce, try to get through, send whether that worked, and read the answer."""
    nonce = read_exactly(tls, _NONCE_BYTES)
    if nonce == _NO_OFFER:
        return None
    met = _reached(_meeting_name(nonce, *_ends(tls)))
    try:
        tls.sendall(_MET if met is not None else _APART)
        if read_exactly(tls, 1) == _MET and met is not None:
            found, met = met, None
            return found
        return None
    finally:
        if met is not None:
            met.close()


def _reached(name: bytes) -> socket.socket | None:
    """Return a connection to the process of this user that listens on a Unix socket of this name, if there is one."""
    meeting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        meeting.settimeout(_MEETING_S)
        meeting.connect(name)
        if _of_this_user(meeting):
            return meeting
    except OSError:
        pass
    meeting.close()
    return None


def _of_this_user(meeting: socket.socket) -> bool:
    """Is the other end of a Unix socket a process of this user?"""
    credentials = meeting.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _ends(tls: ssl.SSLSocket) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """This end's address and the other's: host and port."""
    here, there = tls.getsockname(), tls.getpeername()
    if tls.family == socket.AF_UNIX:
        return (str(here),), (str(there),)
    return tuple(map(str, here[:2])), tuple(map(str, there[:2]))


def _meeting_name(nonce: bytes, calling: tuple[str, ...], called: tuple[str, ...]) -> bytes:
    """The abstract name at which the ends of a connection meet."""
    digest = hashlib.sha256(nonce + repr((calling, called)).encode()).hexdigest()
    return f"\0planaria-{digest}".encode()
