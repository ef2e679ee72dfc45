"""Hybrid jobs start, time after time: every axis's group exchanges, and the pipeline's neighbours speak.

`python tests/gloo/test_starts.py RANKS TIMES` counts starts, prints each failure, and goes on after it. All of
it is marked long: the tests of layouts start every kind of group in passing.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from tests.ranks import run_ranks

AXES = ("data", "tensor", "pipeline", "sharding")
FOUR = tuple(dict.fromkeys(pair, 2) for pair in itertools.combinations(AXES, 2))
EIGHT = tuple(dict.fromkeys(three, 2) for three in itertools.combinations(AXES, 3))


def start(degrees: dict[str, int]) -> dict[str, Any]:
    """What this rank's groups say to each other: {axis: the sum of the global ranks in its group}."""
    import paddle
    import paddle.distributed as dist

    from tests.gloo import cases

    begin, hcg, rank = time.monotonic(), cases.start(degrees), dist.get_rank()
    groups = {
        "data": hcg.get_data_parallel_group(), "tensor": hcg.get_model_parallel_group(),
        "pipeline": hcg.get_pipe_parallel_group(), "sharding": hcg.get_sharding_parallel_group(),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for axis in degrees:
        value = paddle.full([3], float(rank))
        dist.all_reduce(value, group=groups[axis])
        other = next(peer for peer in groups[axis].ranks if peer != rank)
        dist.send(value, other, group=groups[axis])
        dist.recv(echo := paddle.zeros([3]), other, group=groups[axis])
        assert echo.tolist() == value.tolist() == [float(sum(groups[axis].ranks))] * 3
        found[axis] = list(groups[axis].ranks)
    dist.barrier()
    return {"groups": found, "seconds": time.monotonic() - begin}


def count(ranks: int, times: int, stop: bool = True) -> int:
    """Starts a job `times` times, in every layout in turn; the number of failures, or the first one raised."""
    layouts, failures = {4: FOUR, 8: EIGHT}[ranks], 0
    for turn in range(times):
        begin, degrees = time.monotonic(), layouts[turn % len(layouts)]
        try:
            found = run_ranks(start, ranks, degrees, timeout=60 * ranks, fresh=True)
            assert all(set(one["groups"]) == set(degrees) for one in found)
        except (AssertionError, TimeoutError) as error:
            if stop:
                raise
            failures += 1
            print(f"start {turn} {degrees} failed: {error}", flush=True)
        if not stop and turn % 10 == 9:
            last = time.monotonic() - begin
            print(
                f"{turn + 1} starts of {ranks} ranks, {failures} failed, the last in {last:.1f} s", flush=True
            )
    return failures


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("ranks", "times"), [(4, 200), (8, 50)])
def test_hybrid_jobs_start(ranks: int, times: int) -> None:
    count(ranks, times)


if __name__ == "__main__":
    failed = count(int(sys.argv[1]), int(sys.argv[2]), stop=False)
    print(f"{sys.argv[2]} starts on {sys.argv[1]} ranks: {failed} failed")
    sys.exit(bool(failed))
