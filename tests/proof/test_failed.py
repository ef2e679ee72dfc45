"""A float64 run that fails on all ranks, or on some."""

from threading import Thread

import pytest

from paddle_dp.proof.sides import failed_alone, failed_together


def test_what_fails_on_all_ranks_is_a_sentence_on_each(tmp_path):
    said = {}

    def rank(number):
        said[number] = failed_together(TypeError(f"of {number}"), tmp_path, number, 2, wait=10.0)

    threads = [Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {0: "TypeError: of 0", 1: "TypeError: of 1"}


def test_what_fails_on_one_stage_ends_its_job_with_the_cause_and_is_told_of(tmp_path):
    assert failed_alone(tmp_path / "none") is None
    with pytest.raises(TypeError, match="no float64 kernel"):
        failed_together(TypeError("no float64 kernel"), tmp_path, 3, 4, wait=0.1)
    assert failed_alone(tmp_path) == "TypeError: no float64 kernel (on rank 3 only)"
