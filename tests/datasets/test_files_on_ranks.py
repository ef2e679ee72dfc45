"""Images in Parquet and tar files: any number of ranks learns what one process learns, also after a resume."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tests.house.recipes import small_recipe
from tests.house.resumed import assert_learned_on_any_ranks


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "dataset", "workers", "steps", "stop"),
    [
        # A window of 40 KB has a group, and an epoch of 9 steps many.
        ("test_parquet", "use: parquet_images, memory: 40 KB", 1, 20, 14),
        ("test_tar_files", "use: tar_files", 0, 8, 6),  # an epoch has 4
    ],
)
def test_ranks_learn_what_one_process_learns_also_when_resumed_in_an_epoch_on_another_number(
    tmp_path: Path,
    save_image: Callable[..., Path],
    module: str,
    dataset: str,
    workers: int,
    steps: int,
    stop: int,
) -> None:
    contents = import_module(f"tests.datasets.{module}").make(tmp_path, save_image)
    assert module != "test_parquet" or max(map(len, contents)) * 5 > 3 * 1024 / 2
    recipe = small_recipe(
        f"length: {steps} steps, batch: 4, micro_batches: 2", loader=f"{{num_workers: {workers}}}",
        model="convnet, classes: 3, channels: 3, widths: [4]",
        dataset=f"{{{dataset}, path: {tmp_path}, size: 16, resize: 20, augment: trivial, cache: {tmp_path}/c}}",
        callbacks="[{use: checkpoint, every: 100 steps}]",
    )  # fmt: skip
    assert_learned_on_any_ranks(recipe, tmp_path, steps, stop)
