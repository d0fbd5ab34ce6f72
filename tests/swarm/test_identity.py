"""Peer identities and their key files."""

from __future__ import annotations

import pickle
import stat
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from hypothesis import given
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.swarm.board.identity import PeerIdentity, peer_id, verify

ONE = PeerIdentity.generate()
# RFC 8032, section 7.1, test 3
PUBLIC = "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025"
SIGNATURE = (
    "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
    "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"
)


@given(st.binary(max_size=300))
def test_signatures_verify_only_their_data_and_key(data: bytes) -> None:
    signature = ONE.sign(data)
    assert len(signature) == 64 and signature == ONE.sign(data)
    assert verify(ONE.public, signature, data)
    assert not verify(ONE.public, signature, data + b"\0")
    assert not verify(PeerIdentity.generate().public, signature, data)


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_arbitrary_keys_and_signatures_are_invalid(public: bytes, signature: bytes) -> None:
    assert not verify(public, signature, b"data")
    assert not verify(ONE.public, signature, b"data")
    assert not verify(public, ONE.sign(b"data"), b"data")


def test_signatures_match_the_rfc_vector() -> None:
    assert verify(bytes.fromhex(PUBLIC), bytes.fromhex(SIGNATURE), bytes.fromhex("af82"))


def test_an_id_is_a_digest_of_the_public_key() -> None:
    assert peer_id(bytes.fromhex(PUBLIC)) == "dac073e0123bdea59dd9b3bda9cf6037"
    assert peer_id(ONE.public) == ONE.peer != PeerIdentity.generate().peer


def test_a_stored_identity_is_loaded_again(tmp_path: Path) -> None:
    first = PeerIdentity.load_or_create(tmp_path / "deep" / "peer.pem")
    again = PeerIdentity.load_or_create(tmp_path / "deep" / "peer.pem")
    assert first.peer == again.peer and first.sign(b"x") == again.sign(b"x")


def test_the_key_file_is_private_and_alone(tmp_path: Path) -> None:
    PeerIdentity.load_or_create(tmp_path / "peer.pem")
    assert [path.name for path in tmp_path.iterdir()] == ["peer.pem"]
    assert stat.S_IMODE((tmp_path / "peer.pem").stat().st_mode) == 0o600


def test_concurrent_creation_gives_one_identity(tmp_path: Path) -> None:
    got = []
    ready = threading.Barrier(8)

    def make() -> None:
        ready.wait()
        got.append(PeerIdentity.load_or_create(tmp_path / "peer.pem").peer)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8 and len(set(got)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["peer.pem"]


def test_an_identity_never_shows_its_private_key(tmp_path: Path) -> None:
    one = PeerIdentity.load_or_create(tmp_path / "peer.pem")
    key = load_pem_private_key((tmp_path / "peer.pem").read_bytes(), None)
    secret = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption()).hex()
    shown = f"{one!r} {one} {vars(one)}"
    assert one.peer in shown and secret not in shown
    with pytest.raises(TypeError):
        pickle.dumps(one)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_readable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    PeerIdentity.load_or_create(tmp_path / "peer.pem")
    (tmp_path / "peer.pem").chmod(mode)
    with pytest.raises(UserError, match="chmod 600"):
        PeerIdentity.load_or_create(tmp_path / "peer.pem")


def curve() -> bytes:
    key = generate_private_key(SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 9000, curve()], ids=["empty", "text", "long", "other"])
def test_invalid_key_files_are_reported_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peer.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UserError, match=str(path)):
        PeerIdentity.load_or_create(path)
    assert path.read_bytes() == content


def test_a_folder_is_not_a_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a regular file"):
        PeerIdentity.load_or_create(tmp_path)
