"""Who a peer is: an Ed25519 key. Its id is a digest of its public key, so nobody can speak for another."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from planaria.common.errors import UserError
from planaria.swarm.board.write_once import appear

_MOST = 4096
"""bytes of a key file; ours have 119"""


def peer_id(public: bytes) -> str:
    """The id of whoever holds the private half of a raw 32-byte public key: the first 32 hex digits of its SHA-256.

    To find a second key with a given id takes about 2^128 attempts.
    """
    return hashlib.sha256(public).hexdigest()[:32]


def verify(public: bytes, signature: bytes, data: bytes) -> bool:
    """Whether ``signature`` (64 bytes) was made over ``data`` with the key whose raw public half is ``public``."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


class Identity:
    """A peer's own key. The private half leaves this object only into the key file; no text of it shows it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes_raw()
        self.peer = peer_id(self.public)

    def __repr__(self) -> str:
        return f"Identity({self.peer})"

    @classmethod
    def fresh(cls) -> Identity:
        """One that nobody had before and that is kept nowhere."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def kept(cls, path: Path) -> Identity:
        """The identity in the file ``path``, which is made with a fresh one if it is not there.

        :raises UserError: when the file is no such key, or others than its owner may read it.
        """
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            appear(path, pem, 0o600)  # who comes second takes the first one's
        return cls(_read_key(path))

    def sign(self, data: bytes) -> bytes:
        """64 bytes, always the same for the same data (RFC 8032)."""
        return self._key.sign(data)


def _read_key(path: Path) -> Ed25519PrivateKey:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise UserError(f"{path}: not a file; name the file that holds, or shall hold, the key of this peer")
        if mode & 0o077:
            raise UserError(f"{path}: others than its owner may read this peer's key; `chmod 600 {path}`")
        with path.open("rb") as file:
            pem = file.read(_MOST)
    except OSError as error:
        raise UserError(f"{path}: the key of this peer cannot be read ({error.strerror}); name another file") from None
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it wants a password
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(
            f"{path}: no unencrypted Ed25519 key in PEM; name another file, or remove it to get a fresh one"
        )
    return key
