"""Whether a comparison fits is known before anything is computed."""

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.proof.trace import DISK, MEMORY, check_fits

MANY = 10**8
ROOM = 10**13


def test_what_fits_is_let_through():
    check_fits(MANY, [MANY, MANY], 2 * MEMORY * MANY, DISK * MANY, "/tmp")
    check_fits(MANY, [MANY, MANY], None, DISK * MANY, "/tmp")


def test_two_whole_copies_in_too_little_memory_are_refused_with_the_figure():
    with pytest.raises(
        UsageError, match=r"100\.0 million parameters, 2 ranks take 7\.5 GB.*takes 3\.7 GB.* 7\.0 GB are free"
    ):
        check_fits(MANY, [MANY, MANY], 7 * 2**30, ROOM, "/tmp")


def test_halves_on_ranks_fit_but_the_one_process_must_too():
    check_fits(MANY, [MANY // 2, MANY // 2], MEMORY * MANY, ROOM, "/tmp")
    with pytest.raises(UsageError, match="one process"):
        check_fits(MANY, [MANY // 2, MANY // 2], MEMORY * MANY - 1, ROOM, "/tmp")


def test_a_small_disk_is_named():
    with pytest.raises(UsageError, match="/small, some 210 bytes"):
        check_fits(MANY, [MANY, MANY], ROOM, DISK * MANY - 1, "/small")


def test_without_float64_half_is_enough():
    check_fits(MANY, [MANY], MEMORY * MANY // 2, DISK * MANY // 2, "/tmp", wide=False)
