"""Every way to exchange gradients under data_parallel, and compressed ones, on two devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.parity import train
from tests.proof import test_rounded
from tests.ranks import run_ranks
from tests.sim.test_layouts import assert_one_process

pytestmark = pytest.mark.long
COMPRESSED = ("bfloat16", "float16", "power_sgd rank 2 after 2 steps")
SMALL = "comm_buffer_size: 20 KB, last_comm_buffer_size: 4 KB"


def test_each_way_is_one_process(tmp_path: Path) -> None:
    ways = ("after", "per_parameter", f"bucketed, {SMALL}", f"bucketed, {SMALL}, recompute: full")
    assert_one_process({way: f"strategy={{use: data_parallel, exchange: {way}}}" for way in ways}, tmp_path)


@pytest.mark.parametrize("strategy", [
    *(f"{{use: data_parallel, compress: {compress}}}" for compress in COMPRESSED),
    *(f"{{use: hybrid, {axes}, reduce_dtype: bfloat16}}" for axes in (
        "data: 2", "sharding: 2, sharding_stage: 2", "sharding: 2, sharding_stage: 3")),
])  # fmt: skip
def test_two_runs_have_the_same_bits_and_learn_what_cpus_do(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = (run_ranks(train, 2, str(tmp_path / name), strategy) for name in ("first", "again"))
    assert first[0]["rows"] == first[1]["rows"] == again[0]["rows"]
    run_ranks(train, 2, str(tmp_path / "parts"), strategy, "4 steps")
    parts = run_ranks(train, 2, str(tmp_path / "parts"), strategy, resume=True)
    assert parts[0]["rows"] == first[0]["rows"][4:]
    monkeypatch.delenv("CUSTOM_DEVICE_ROOT")
    cpus = run_ranks(train, 2, str(tmp_path / "cpus"), strategy)
    np.testing.assert_allclose(first[0]["rows"], cpus[0]["rows"], rtol=2**-8)


@pytest.mark.parametrize(("layouts", "ranks"), [
    (test_rounded.TWO, 2), (test_rounded.THREE, 3),
    ({name: words for name, words in test_rounded.FOUR.items() if "stage 3" in name}, 4),
])  # fmt: skip
def test_each_step_is_one_process_but_for_what_is_rounded(
    layouts: dict[str, str], ranks: int, tmp_path: Path
) -> None:
    test_rounded.assert_each_step_is_one_process(layouts, tmp_path, ranks)
