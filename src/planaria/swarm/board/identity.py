"""Peer identity: an Ed25519 key; the peer id is a digest of its public half."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from planaria.common.atomic import write_new
from planaria.common.errors import UserError

_MAX_KEY_BYTES = 4096
"""bytes read of a key file; a generated one has 119"""


def peer_id(public: bytes) -> str:
    """Return the peer id of a raw 32-byte public key: the first 32 hex digits of its SHA-256.

    Finding a second key with a given id takes about 2^128 attempts.
    """
    return hashlib.sha256(public).hexdigest()[:32]


def verify(public: bytes, signature: bytes, data: bytes) -> bool:
    """Return whether ``signature`` (64 bytes) is valid for ``data`` under the raw public key ``public``."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


class PeerIdentity:
    """A peer's private key. It is written only to the key file and is never shown."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes_raw()
        self.peer = peer_id(self.public)

    def __repr__(self) -> str:
        return f"Identity({self.peer})"

    @classmethod
    def generate(cls) -> PeerIdentity:
        """Generate an identity without storing it."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> PeerIdentity:
        """Load the identity from the file ``path``; create the file if it is missing.

        :raises UserError: if the file has no valid key, or users other than its owner may read it.
        """
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            write_new(path, pem, 0o600)  # if another process created it first, its key is read
        return cls(_read_key(path))

    def sign(self, data: bytes) -> bytes:
        """Return a deterministic signature of 64 bytes (RFC 8032)."""
        return self._key.sign(data)


def _read_key(path: Path) -> Ed25519PrivateKey:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise UserError(f"{path}: not a regular file; use a file for this peer's key")
        if mode & 0o077:
            raise UserError(f"{path}: this peer's key is readable by other users; run `chmod 600 {path}`")
        with path.open("rb") as file:
            pem = file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot read this peer's key ({error.strerror}); use another file") from None
    try:
        key = load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: the key is encrypted
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{path}: no unencrypted Ed25519 key in PEM; use another file, or remove it to create a key")
    return key
