"""The bits: the same on any device, and random enough that no test here tells them from coin tosses."""

import numpy as np
import paddle
import pytest

from paddle_dp.core.dropout import masks


def keys(n, first=0, seed=0, epoch=0, index=0, element=0, call=0):
    places = range(first, first + n)
    return masks.keys(
        masks.sample_hashes(masks.hash64(seed, epoch, index), places), masks.hash64(element, call)
    )


def dropped(p, n, rest, **which):
    return masks.dropped(keys(n, **which), masks.positions((rest,), ((0, rest),)), p)


def standardized(p, n, rest, **which):
    return (dropped(p, n, rest, **which) - p) / np.sqrt(p * (1 - p))


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 1 - 2**-34])
@pytest.mark.parametrize("shape", [(7, 300, 90), (3,), ()])
def test_int32_operations_of_paddle_give_the_bits_of_numpy(p, shape):
    held = tuple((size // 3, size) for size in shape)
    numpy = masks.dropped(keys(3, 40), masks.positions(shape, held), p)
    assert (masks.dropped_on_device(keys(3, 40), shape, held, p, paddle.CPUPlace()).numpy() == numpy).all()


def test_the_bits_do_not_change_between_versions():
    """A resumed run goes on with them."""
    assert keys(2, 5, 1, 2, 3, 4, 6)[0].tolist() == FIRST and keys(2, 5, 1, 2, 3, 4, 6)[1].tolist() == SECOND
    assert np.flatnonzero(dropped(0.1, 2, 32, first=5, seed=1)).tolist() == DROPPED


FIRST, SECOND = [3037941811, 3254661785], [1386421106, 4069721904]
DROPPED = [4, 17, 24, 29, 39, 42, 44, 57]  # of the 2 · 32 elements


def test_parts_and_chunks_are_those_of_the_whole():
    whole = masks.dropped(keys(5), masks.positions((4, 70000), ((0, 4), (0, 70000))), 0.3).reshape(
        5, 4, 70000
    )
    part = masks.dropped(keys(2, 3), masks.positions((4, 70000), ((2, 4), (10, 69999))), 0.3)
    assert (part.reshape(2, 2, -1) == whole[3:, 2:, 10:69999]).all()


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_as_many_are_dropped_as_asked_in_every_sample_and_at_every_position(p):
    n, rest = 64, 16384
    z = standardized(p, n, rest)
    assert abs(z.sum()) / np.sqrt(z.size) < 4
    for axis, size in ((1, rest), (0, n)):
        sums = z.sum(axis) / np.sqrt(size)
        assert 0.75 < sums.std() < 1.25
        assert np.abs(sums).max() < 5.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_samples_positions_updates_calls_and_seeds_have_nothing_to_do_with_each_other(p):
    n, rest = 48, 16384
    z = standardized(p, n, rest)
    pairs = (z @ z.T / np.sqrt(rest))[np.triu_indices(n, 1)]
    assert 0.9 < pairs.std() < 1.1
    assert np.abs(pairs).max() < 5
    for lag in (1, 2, 3, 4, 16, 128, 768, 4096):
        assert abs((z[:, lag:] * z[:, :-lag]).sum()) / np.sqrt(n * (rest - lag)) < 4.5, lag
    for other in ({"seed": 1}, {"epoch": 1}, {"index": 1}, {"element": 1}, {"call": 1}, {"first": n}):
        assert abs((z * standardized(p, n, rest, **other)).sum()) / np.sqrt(z.size) < 4.5, other


def test_no_sample_is_another_moved_along():
    """The largest correlation of two of 8 samples at any shift is what chance gives: sqrt(2 ln(28 · 16384)) = 5.1."""
    rest = 16384
    spectra = np.fft.rfft(standardized(0.5, 8, rest), axis=1)
    largest = max(
        np.abs(np.fft.irfft(spectra[a] * np.conj(spectra[b]), rest)).max() / np.sqrt(rest)
        for a in range(8)
        for b in range(a)
    )
    assert largest < 6.2


def test_bytes_of_neighbours_are_uniform_and_keys_distinct():
    counts = sum(
        np.bincount(
            np.packbits(dropped(0.5, 64, 1024, index=k).reshape(64, -1, 8), axis=-1).ravel(), minlength=256
        )
        for k in range(50)
    )
    expected = counts.sum() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * 22.6
    words = [keys(256, index=index, call=call) for index in range(100) for call in range(20)]
    both = np.concatenate([first.astype(np.uint64) << np.uint64(32) | second for first, second in words])
    assert np.unique(both).size == both.size
