"""Every code through its protocol: restored losses, number of reads, and errors."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.common.errors import UserError
from planaria.recovery import codes
from planaria.recovery.codes.base import ErasureCode, LossError, repairable_shares, tolerates
from planaria.recovery.codes.field import INVERSE, PRODUCT, combine, rank, solve_in_columns
from planaria.recovery.codes.reed_solomon import cauchy

GROUPS = [(4, 1), (4, 2), (6, 2), (8, 3)]
ODD = np.array([np.nan, -0.0, 1e-45, -1e-40, np.inf], np.float32).view(np.uint8)
"""bytes of NaN, −0, denormals and infinity"""


def some(count: int, size: int, seed: int = 0) -> list[np.ndarray]:
    """Return shards of random bytes that begin with special floats."""
    drawn = np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)
    for row in drawn:
        row[: min(size, ODD.size)] = ODD[:size]
    return list(drawn)


def multiply(a: int, b: int) -> int:
    """Multiply polynomials and reduce the product."""
    total = 0
    for bit in range(8):
        if b >> bit & 1:
            total ^= a << bit
    for bit in reversed(range(8, 15)):
        if total >> bit & 1:
            total ^= 0x11D << bit - 8
    return total


def test_products_and_inverses_match_the_definition():
    assert all(PRODUCT[a, b] == multiply(a, b) for a in range(256) for b in range(256))
    assert all(PRODUCT[a, INVERSE[a]] == 1 for a in range(1, 256))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sums_over_words_match_sums_over_bytes(data):
    count, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    shards = [np.frombuffer(data.draw(st.binary(max_size=size)), np.uint8) for _ in range(count)]
    row = data.draw(st.lists(st.integers(0, 255), min_size=count, max_size=count))
    expected = np.zeros(size, np.uint8)
    for weight, shard in zip(row, shards, strict=True):
        expected[: shard.size] ^= np.array([multiply(weight, int(byte)) for byte in shard], np.uint8)
    assert combine(np.array([row], np.uint8), shards, size)[0].tobytes() == expected.tobytes()


def test_sums_of_several_pieces_match():
    shards = some(3, 200_003)
    row = np.array([[1, 7, 200]], np.uint8)
    expected = shards[0] ^ PRODUCT[7, shards[1]] ^ PRODUCT[200, shards[2]]
    assert (combine(row, shards, 200_003)[0] == expected).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_elimination_solves_exactly_the_solvable_systems(seed, rows, columns, targets):
    drawn = np.random.default_rng(seed)
    have = drawn.choice([0, 0, 1, 5, 77], (rows, columns)).astype(np.uint8)
    want = drawn.choice([0, 0, 1, 9], (rows, targets)).astype(np.uint8)
    found = solve_in_columns(have, want)
    joined = np.concatenate([have, want], axis=1)
    alone = rank(np.stack([np.pad(have, ((0, 0), (0, targets))), joined]))
    assert (found is not None) == (alone[0] == alone[1])
    if found is not None:
        sums = np.bitwise_xor.reduce(PRODUCT[have[:, :, None], found.T[None]], axis=1)
        assert (sums == want).all()


@pytest.mark.parametrize(("members", "tolerate"), GROUPS)
@pytest.mark.parametrize("size", [1, 31, 64])
def test_every_loss_set_is_restored_bit_for_bit(members, tolerate, size):
    code = codes.make_code("auto", members, tolerate)
    shards = some(code.data, size)
    everything = shards + code.encode(shards)
    for lost in (lost for count in range(1, tolerate + 1) for lost in combinations(range(members), count)):
        reads = code.plan(lost)
        assert not isinstance(reads, str) and not set(reads) & set(lost) and len(reads) <= code.data
        back = code.repair({n: everything[n] for n in reads}, lost)
        assert {n: back[n].tobytes() for n in lost} == {n: everything[n].tobytes() for n in lost}


@pytest.mark.parametrize(("members", "tolerate"), GROUPS)
def test_one_loss_more_than_the_parities_is_refused(members, tolerate):
    code = codes.make_code("auto", members, tolerate)
    shards = some(code.data, 16)
    everything = shards + code.encode(shards)
    for lost in combinations(range(members), tolerate + 1):
        named = ", ".join(map(str, lost))
        assert code.plan(lost) == f"shards {named} cannot be rebuilt: {named} of {members} are lost"
        with pytest.raises(LossError, match=f"^shards {named} cannot be rebuilt from "):
            code.repair({n: everything[n] for n in range(members) if n not in lost}, lost)


def test_bytes_tensors_and_arrays_are_equivalent():
    code = codes.make_code("auto", 5, 2)
    shards = some(3, 20)
    expected = [parity.tobytes() for parity in code.encode(shards)]
    for given_ in ([s.tobytes() for s in shards], [torch.from_numpy(s) for s in shards], [s.data for s in shards]):
        assert [parity.tobytes() for parity in code.encode(given_)] == expected
    with pytest.raises(ValueError, match="float32"):
        code.encode([torch.zeros(2)] * 3)
    with pytest.raises(ValueError, match="2 shards for a code of 3"):
        code.encode(shards[:2])
    with pytest.raises(ValueError, match="unequal lengths: 1, 2, 2 bytes"):
        code.repair({0: b"ab", 1: b"a", 2: b"cd"}, [3])
    with pytest.raises(ValueError, match="shards 5: there are 5"):
        code.plan([5])


@pytest.mark.parametrize(("rows", "columns"), [(1, 6), (2, 5), (3, 8), (4, 12), (8, 8)])
def test_every_square_submatrix_is_invertible(rows, columns):
    code = ErasureCode(cauchy(rows, columns))
    assert tolerates(code, rows) and repairable_shares(code) == [1.0] * (rows + 1)


def test_the_first_two_rows_are_ones_and_consecutive_numbers():
    assert cauchy(2, 5).tolist() == [[1, 1, 1, 1, 1], [1, 2, 3, 4, 5]]


@pytest.mark.slow
def test_the_largest_group_is_restored():
    code = codes.make_code("auto", 256, 2)
    shards = some(code.data, 8)
    everything = shards + code.encode(shards)
    for lost in ((0, 253), (17, 255), (254, 255)):
        back = code.repair({n: everything[n] for n in code.plan(lost)}, lost)
        assert all((back[n] == everything[n]).all() for n in lost)


def test_local_groups_read_three_for_one_loss_and_survive_any_six():
    code = codes.make_code("local", 16, 6)
    assert (code.data, code.shards) == (8, 16)
    assert {len(code.plan([n])) for n in range(16)} == {3}
    found = repairable_shares(code)
    assert found[:7] == [1.0] * 7
    assert found[7] == pytest.approx(0.996, abs=0.02) and found[8] == pytest.approx(0.847, abs=0.02)
    survived = [*found, *[0.0] * (17 - len(found))]
    for p, expected in ((0.01, 6e-13), (0.05, 9e-8), (0.1, 1.6e-5), (0.2, 2.4e-3)):
        chance = sum(comb(16, n) * p**n * (1 - p) ** (16 - n) * (1 - share) for n, share in enumerate(survived))
        assert chance == pytest.approx(expected, rel=0.15)


@pytest.mark.slow
def test_local_groups_restore_any_six_losses():
    code = codes.make_code("local", 16, 6)
    shards = some(8, 24)
    everything = shards + code.encode(shards)
    for lost in list(combinations(range(16), 6))[::17]:
        back = code.repair({n: everything[n] for n in code.plan(lost)}, lost)
        assert all((back[n] == everything[n]).all() for n in lost)


def test_a_local_repair_reads_its_group_only():
    code = codes.make_code("local", 16, 6)
    group = next(check for check in code.checks if 0 in check)
    elsewhere = next(n for n in range(16) if n not in group)
    assert set(code.plan([0, elsewhere], [0])) == group - {0}
    assert code.plan([elsewhere], [0]) == ()


@pytest.mark.parametrize(
    ("given_", "complaint"),
    [
        (("auto", 4, 4), "tolerate = 4: a group of 4 can lose 1 to 3"),
        (("auto", 4, 0), "tolerate = 0: a group of 4"),
        (("auto", 257, 2), "at most 256 shards"),
        (("xor", 5, 2), "survives one loss, not 2; use 'reed_solomon'"),
        (("local", 5, 4), "cannot survive any 4 losses"),
        (("reed_solomo", 5, 2), "did you mean 'reed_solomon'"),
        (("local", 200, 6), "too many to try"),
        (("local", 16, 3, {"group": 1}), "greater than or equal to 2"),
        (("none.json", 5, 1), "none.json cannot be read"),
    ],
)
def test_an_unsupported_group_is_refused(given_, complaint):
    with pytest.raises(UserError) as error:
        codes.make_code(*given_)
    assert complaint in str(error.value) and "\n" not in str(error.value)
