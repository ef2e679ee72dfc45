"""A tensor's digest is the same however it was split, and another one for any other bits."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_dp.checkpoint import load, save
from paddle_dp.checkpoint.digest import MODULUS, TensorSum, digest, digests_of, sum_of
from paddle_dp.checkpoint.shards import DTYPES

SHAPE = (6, 10, 4)


def numbers(dtype: str) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(3).bytes(8 * 240), DTYPES[dtype][1])[:240].reshape(SHAPE)


def cuts(array: np.ndarray, dim: int, at: int) -> int:
    """The sum of two parts."""
    first, second = np.split(array, [at], axis=dim)
    offset = [0] * array.ndim
    offset[dim] = at
    return (sum_of(first) + sum_of(second, offset)) % MODULUS


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "bool"])
def test_parts_add_up(dtype):
    array = numbers(dtype)
    whole = sum_of(array)
    assert {cuts(array, dim, at) for dim, n in enumerate(SHAPE) for at in range(n + 1)} == {whole}


def test_it_is_what_the_module_says():
    """Element by element, in Python's own integers."""
    array = numbers("float32")[:2, :3, :2].copy()

    def factor(dim: int, place: int) -> int:
        z = 0x9E3779B97F4A7C15 * (place + 1 + (dim << 48)) % MODULUS
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
        return (z ^ (z >> 31)) | 1

    bits = array.view(np.uint32)
    total = sum(
        int(bits[place]) * factor(0, place[0]) * factor(1, place[1]) * factor(2, place[2]) * factor(3, 0)
        for place in np.ndindex(bits.shape)
    )
    assert sum_of(array) == total % MODULUS


@pytest.mark.parametrize("shape", [(300_000,), (3, 200_000), (70_000, 3), (2, 3, 100_000), (5, 1, 1), ()])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_blocks_are_no_part_of_it(shape, dtype, monkeypatch):
    from paddle_dp.checkpoint import digest as module

    array = np.asarray(np.random.default_rng(1).standard_normal(shape), dtype)
    whole = sum_of(array)
    monkeypatch.setattr(module, "_BLOCK", 1000)
    monkeypatch.setattr(module, "_COLUMNS", 8)
    assert sum_of(array) == whole != 0


def test_any_bit_matters():
    array = numbers("float64").copy()
    sums = {sum_of(array)}
    bits = array.reshape(-1).view(np.uint64)
    for bit in range(64):
        bits[17] ^= np.uint64(1 << bit)
        sums.add(sum_of(array))
        bits[17] ^= np.uint64(1 << bit)
    bits ^= np.uint64(1 << 63)  # every sign
    sums.add(sum_of(array))
    sums.add(sum_of(array[::-1].copy()))
    assert len(sums) == 1 + 64 + 2


def test_names_types_and_shapes_matter():
    base = TensorSum("float32", (2, 3), 5)
    others = [TensorSum("int32", (2, 3), 5), TensorSum("float32", (3, 2), 5), TensorSum("float32", (2, 3), 6)]
    assert len({digest({"w": one}) for one in (base, *others)} | {digest({"v": base})}) == 5
    assert set(digests_of({"model/w": base, "optimizer/w/m": base})) == {"model", "optimizer"}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_checkpoint_has_the_same_digests_in_any_layout(on_ranks, snapshot_of, tmp_path, ranks):
    on_ranks(1, lambda mesh: save(snapshot_of(3), tmp_path / "one", mesh))
    path, *_ = on_ranks(ranks, lambda mesh: save(snapshot_of(3, mesh.rank, ranks), tmp_path / "many", mesh))
    one, many = load(tmp_path / "one" / path.name), load(path)
    assert many.digests() == one.digests() == many.computed_digests() != {}
