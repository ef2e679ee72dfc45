"""How often the host waits for the device in a training step, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.sim.recipes import gpt
from tests.sim.waits import Waits


def waits(recipe: str, strategy: str) -> dict[str, int]:
    """In a rank: the waits of updates 9 to 12, whose numbers nobody reads (buffers are compared after 8, and 16)."""
    import paddle

    from paddle_dp.mesh import join
    from paddle_dp.recipe import read_recipe
    from paddle_dp.train.build import build

    mesh = join()
    overrides = [strategy, "model.dropout=0", f"output_dir={Path(recipe).parent}/{mesh.rank}"]
    trainer = build(read_recipe(recipe, overrides), mesh)
    for epoch in (0, 1):
        for batch in trainer.loader.read(epoch):
            trainer.learner.train_batch(batch)
    batches = list(
        trainer.loader.read(2)
    )  # read before: Paddle copies from pageable memory at once, and waits
    with Waits() as seen:
        for batch in batches:
            trainer.learner.train_batch(batch)
    paddle.device.synchronize()  # a rank that leaves takes what it is still sending with it
    mesh.wait("the end")
    return dict(seen.lines)


def read(recipe: str) -> dict[str, int]:
    """In a rank: the waits of reading a number once."""
    import paddle

    from paddle_dp.mesh import join

    join()
    x = paddle.ones([3]) * 2
    with Waits() as seen:
        x.tolist()
    return dict(seen.lines)


@pytest.mark.parametrize(
    "strategy",
    [
        "strategy={use: data_parallel}", "strategy={use: hybrid, sharding: 2, sharding_stage: 1}",
        *(
            pytest.param(f"strategy.{axis}=2", marks=pytest.mark.long)
            for axis in ("data", "tensor", "sequence", "pipeline")
        ),
    ],
)  # fmt: skip
def test_a_step_that_nobody_reads_waits_for_nothing(tmp_path: Path, strategy: str) -> None:
    assert run_ranks(waits, 2, str(gpt(tmp_path)), strategy) == [{}, {}]


@pytest.mark.long
def test_stage_3_waits_where_the_ranks_agree_on_the_next_layers(tmp_path: Path) -> None:
    """Each of its rounds is read from the device: which layers a rank runs may depend on its samples."""
    found = run_ranks(waits, 2, str(gpt(tmp_path)), "strategy={use: hybrid, sharding: 2, sharding_stage: 3}")
    assert {line.partition(":")[2].partition(":")[0].strip() for line in found[0]} == {
        "paddle_dp/parallel/sharding/rounds.py"
    }


def test_a_wait_is_told_with_its_line(tmp_path: Path) -> None:
    (found,) = run_ranks(read, 1, str(gpt(tmp_path)))
    assert found and all(line.startswith("stream: tests/sim/test_waits.py:") for line in found)
