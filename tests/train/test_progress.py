"""A count that only goes forward."""

from dataclasses import dataclass

import pytest

from paddle_dp.train.callback import Progress


def test_batches_add_up_and_epochs_begin_anew():
    progress = Progress().advance(50).advance(37).next_epoch().advance(50)
    assert progress == Progress(epoch=1, batch=1, step=3, samples=137)


def test_a_count_of_another_version_is_not_lost_on_the_way():
    @dataclass(frozen=True, kw_only=True)
    class Longer(Progress):
        words: int = 0

    assert Longer(words=3).advance(50).next_epoch() == Longer(words=3, epoch=1, step=1, samples=50)


def test_its_state_brings_it_back():
    progress = Progress(epoch=2, batch=5, step=29, samples=1437)
    assert Progress.restored(progress.state()) == progress


def test_other_counts_are_refused():
    for counts in ({"epoch": 1, "step": 3}, {**Progress().state(), "tokens": 1}):
        with pytest.raises(ValueError, match=r"^progress has .*, not batch, epoch, samples, step$"):
            Progress.restored(counts)
