"""How the two ends of a connection prove the run's key to each other, before anything else is read or sent.

Both ends hold the same 32 random bytes. An Ed25519 key pair and its self-signed certificate follow from them, the same
in every process of the run, and TLS 1.3 demands that certificate of both ends: a stranger cannot finish the handshake.
What leaves the machine stays inside TLS. Between processes of one machine the handshake is all there is: it has shown
who the other is, and encryption would cost more than the transfer. See docs/assumptions.md for what this defends.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import socket
import ssl
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

KEY_BYTES = 32
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "planaria")])
_FROM, _UNTIL = datetime.datetime(2020, 1, 1), datetime.datetime(9999, 12, 31)
"""a run's key lives as long as the run; clocks of strangers' machines may be wrong"""


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


def stays_here(raw: socket.socket) -> bool:
    """Is the other end on this machine? Both ends answer alike: a connection that leaves it has two addresses."""
    if raw.family == socket.AF_UNIX:
        return True
    return bool(raw.getsockname()[0] == raw.getpeername()[0])
