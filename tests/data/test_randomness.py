"""A sample's randomness is its own."""

import random

import numpy as np

from paddle_dp.data.randomness import key, restoring_globals, seed_sample


def drawn():
    return random.random(), np.random.random()


def test_a_key_gives_the_same_draws_again():
    seed_sample(1, 2, 3)
    first = drawn()
    drawn()
    seed_sample(1, 2, 3)
    assert drawn() == first


def test_every_part_of_the_key_matters():
    keys = {key(seed, epoch, index) for seed in range(10) for epoch in range(10) for index in range(100)}
    assert len(keys) == 10_000
    assert key(0, 1, 2) != key(0, 2, 1)
    assert 0 <= key(-5, 3, 2) < 2**64


def test_a_key_is_the_same_for_ever():
    assert key(0, 0, 0) == 2558736989570252433
    assert key(7, 3, 1437) == 2923604773251145832


def test_the_programs_own_randomness_is_put_back():
    random.seed(5)
    np.random.seed(5)
    expected = drawn(), drawn()
    random.seed(5)
    np.random.seed(5)
    first = drawn()
    with restoring_globals():
        seed_sample(0, 0, 9)
        drawn()
    assert (first, drawn()) == expected


def test_it_is_put_back_after_a_failure_too():
    np.random.seed(5)
    expected = np.random.random()
    np.random.seed(5)
    try:
        with restoring_globals():
            np.random.seed(1)
            raise KeyError
    except KeyError:
        pass
    assert np.random.random() == expected
