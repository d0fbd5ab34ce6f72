"""Authentication of both ends of a connection by the run's key.

Both ends hold the same 32 random bytes, from which an Ed25519 key pair and its self-signed certificate follow, equal in
every process of the run. TLS 1.3 requires that certificate from both ends. Traffic between hosts stays inside TLS.
Edges between processes of one host continue in plain text after the handshake, because encryption would cost more than
the transfer; :func:`meet_here` proves that. See docs/limits.md for the threat model.
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
NO_PROC = "/proc/self/fd: missing, and workers need it for connections; mount /proc, or train with --engine inline"
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "planaria")])
_FROM, _UNTIL = datetime.datetime(2020, 1, 1), datetime.datetime(9999, 12, 31)
"""a run's key lives as long as the run, and clocks may be wrong"""
_NONCE_BYTES = 32
_NO_NONCE = bytes(_NONCE_BYTES)
"""value instead of a nonce: the connection stays inside TLS"""
_MET, _APART = b"\x01", b"\x00"
_MEETING_S = 1.0
"""seconds; a connection within one kernel succeeds or fails immediately"""
_BACKLOG = 8
"""connections to the Unix socket, including strangers"""
_CREDENTIALS = struct.Struct("iII")
"""``struct ucred``: process, user, group"""


class StrangerError(Exception):
    """The other end has not proved the run's key."""


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


@lru_cache(maxsize=8)
def _contexts(key: bytes) -> tuple[ssl.SSLContext, ssl.SSLContext, bytes]:
    """Return the contexts of the calling and the called end, and their certificate (DER)."""
    seed = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=b"planaria tls identity 1").derive(key)
    private = Ed25519PrivateKey.from_private_bytes(seed)
    built = x509.CertificateBuilder(_NAME, _NAME, private.public_key(), 1, _FROM, _UNTIL)
    # Ed25519 signatures are deterministic, so every process creates the same certificate.
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
    called.num_tickets = 0  # sessions are not resumed
    return calling, called, certificate.public_bytes(Encoding.DER)


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Load a certificate and key, which OpenSSL reads only from files; this one is in memory."""
    handle = os.memfd_create("planaria", os.MFD_CLOEXEC)
    try:
        os.write(handle, pem)
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    except FileNotFoundError:
        raise UserError(NO_PROC) from None
    finally:
        os.close(handle)


def prepare(key: bytes) -> None:
    """Prepare handshakes, so that the first one is as fast as the others."""
    _contexts(key)


def begin(raw: socket.socket, key: bytes, calling: bool) -> ssl.SSLSocket:
    """Wrap ``raw`` in TLS, before the handshake."""
    client, server, _ = _contexts(key)
    with contextlib.suppress(OSError):  # a Unix socket has no such delay
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return (client if calling else server).wrap_socket(
        raw, server_side=not calling, do_handshake_on_connect=False, suppress_ragged_eofs=False
    )


def prove(tls: ssl.SSLSocket, key: bytes, seconds: float) -> None:
    """Prove the key to the other end, and require its proof, within ``seconds``.

    A calling end may finish before the other has verified it; the first answer confirms that.

    :raises StrangerError: if the other end does not know the key.
    :raises OSError: if the connection breaks, or the other end does not prove the key in time.
    """
    tls.settimeout(seconds)
    try:
        tls.do_handshake()
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # a rejected end receives an alert instead
        raise ConnectionAbortedError("it hung up while the key was being proved") from None
    except ssl.SSLError as error:
        raise StrangerError(f"it does not know the run's key ({error.reason or 'no handshake'})") from None
    except TimeoutError:
        raise TimeoutError(f"it has not proved the run's key in {seconds:g} s") from None
    if tls.getpeercert(binary_form=True) != _contexts(key)[2]:
        raise StrangerError("its certificate is not the run's")


def read_exactly(tls: ssl.SSLSocket, count: int, until: float = math.inf) -> bytes:
    """Read ``count`` bytes, each piece within the socket's timeout, or all by ``until`` (monotonic seconds).

    :raises OSError: if the other end disconnects, or takes longer.
    """
    got = bytearray()
    while len(got) < count:
        if until < math.inf:
            tls.settimeout(max(0.001, until - time.monotonic()))
        if not (more := tls.recv(count - len(got))):
            raise ConnectionError("it hung up")
        got += more
    return bytes(got)


def cut_off(tls: ssl.SSLSocket) -> None:
    """Shut a connection down for both ends and wake its threads; it must still be closed."""
    with contextlib.suppress(OSError):  # already broken
        socket.socket.shutdown(tls, socket.SHUT_RDWR)  # its own method would drop TLS


def meet_here(tls: ssl.SSLSocket) -> socket.socket | None:
    """Return a Unix socket to the other end if both are processes of one user in one network namespace, without a
    forwarder between them; else None.

    Both ends of an authenticated connection call this at the same point and get the same answer. Equal addresses are no
    proof, since both hosts may have a forwarder on loopback. So the called end listens on a Unix socket with an
    abstract name, which exists in one network namespace of one kernel, and the calling end must reach it. The name is
    the digest of a nonce, sent inside TLS, and of both addresses as each end sees them, which a forwarder would change.
    Each end also requires its own user at the other, so that another user cannot use the name. Any failure returns
    None.

    :raises OSError: if the connection breaks, or the other end exceeds the socket's timeout.
    """
    return _listen_here(tls) if tls.server_side else _connect_here(tls)


def _listen_here(tls: ssl.SSLSocket) -> socket.socket | None:
    """Run the called end's part: listen, send the nonce, and read whether the other end connected."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    own, other = _ends(tls)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        try:
            if own[0] != other[0]:  # saves a round trip between hosts
                raise OSError("another host")
            listening.bind(_meeting_name(nonce, other, own))
            listening.listen(_BACKLOG)
        except OSError:
            tls.sendall(_NO_NONCE)
            return None
        tls.sendall(nonce)
        met = _accept(listening) if read_exactly(tls, 1) == _MET else None
        # Confirm: strangers may have filled the queue before the other end.
        tls.sendall(_MET if met is not None else _APART)
        return met


def _accept(listening: socket.socket) -> socket.socket | None:
    """Return the first connection of this user."""
    listening.settimeout(_MEETING_S)
    for _ in range(_BACKLOG + 1):  # Linux queues one connection beyond the backlog
        try:
            accepted, _ = listening.accept()
        except OSError:
            break
        if _of_this_user(accepted):
            return accepted
        accepted.close()
    return None


def _connect_here(tls: ssl.SSLSocket) -> socket.socket | None:
    """Run the calling end's part: read the nonce, connect, send whether that worked, and read the answer."""
    nonce = read_exactly(tls, _NONCE_BYTES)
    if nonce == _NO_NONCE:
        return None
    met, agreed = _connect_once(_meeting_name(nonce, *_ends(tls))), False
    try:
        tls.sendall(_MET if met is not None else _APART)
        agreed = read_exactly(tls, 1) == _MET
    finally:
        if met is not None and not agreed:
            met.close()
    return met if agreed else None


def _connect_once(name: bytes) -> socket.socket | None:
    """Return a connection to the process of this user that listens at this abstract name, or None."""
    local_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        local_socket.settimeout(_MEETING_S)
        local_socket.connect(name)
        if _of_this_user(local_socket):
            return local_socket
    except OSError:
        pass
    local_socket.close()
    return None


def _of_this_user(local_socket: socket.socket) -> bool:
    """Return whether the other end of a Unix socket is a process of this user."""
    credentials = local_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _ends(tls: ssl.SSLSocket) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return this end's address and the other's: host and port."""
    own, other = tls.getsockname(), tls.getpeername()
    if tls.family == socket.AF_UNIX:
        return (str(own),), (str(other),)
    return tuple(map(str, own[:2])), tuple(map(str, other[:2]))


def _meeting_name(nonce: bytes, calling: tuple[str, ...], called: tuple[str, ...]) -> bytes:
    """Return the abstract name for the ends of a connection."""
    digest = hashlib.sha256(nonce + repr((calling, called)).encode()).hexdigest()
    return f"\0planaria-{digest}".encode()
