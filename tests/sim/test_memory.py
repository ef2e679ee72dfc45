"""A device with little memory: what does not fit is told with what was held; sharding or recomputing makes it fit."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.house.recipes import small_recipe
from tests.house.training import build_trainer, settle
from tests.ranks import run_ranks


def recipe_of(width: int, batch: int, samples: int) -> str:
    return small_recipe(
        f"length: 3 steps, batch: {batch}", schedule="constant, learning_rate: 1.0e-3", strategy="hybrid",
        model=f"gpt, vocab: 64, width: {width}, depth: 6, heads: 4, length: 32", callbacks="[]",
        dataset=f"random_tokens, vocab: 64, length: 32, samples: {samples}",
    )  # fmt: skip


def train(folder: str, words: str, width: int, batch: int, limit: float = 0) -> dict[str, float]:
    """In a rank: three steps on a device with `limit` bytes. The losses, and the most bytes that the device had."""
    if limit:
        os.environ["SIM_MEMORY"] = str(limit)
    import ctypes

    from paddle_dp.train.steps import StepDriver, TrainStep

    recipe = recipe_of(width, batch, 3 * batch)
    trainer = build_trainer(recipe, folder, f"strategy={words}")
    # Steps alone: the trial forwards before and after a training need memory of their own.
    driver = StepDriver(trainer, [])
    steps = [TrainStep(1, batch, False, [], True, 0.0) for batch in trainer.loader.read(0)]
    metrics = [driver.train_batch(step) for step in steps]
    settle(trainer)
    library = ctypes.CDLL(str(Path(os.environ["CUSTOM_DEVICE_ROOT"]) / "libsim.so"))
    library.sim_memory_most.restype = ctypes.c_uint64
    device = int(trainer.mesh.device.partition(":")[2])
    return {"loss": metrics[-1]["loss"], "most": library.sim_memory_most(device)}


SHARDED = "{use: hybrid, sharding: 2, sharding_stage: %d, recompute: %s}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("small", "width", "batch", "limit"),
    [  # with less than 22 and 16 MB stage 1 alone has no room
        pytest.param(SHARDED % (3, "none, prefetch: 0"), 160, 2, 20e6, id="stage 3, where states are much"),
        pytest.param(
            SHARDED % (1, "full"),
            96,
            16,
            14e6,
            id="recompute, where activations are much",
        ),
    ],
)
def test_what_one_layout_has_no_room_for_another_trains(
    tmp_path: Path, small: str, width: int, batch: int, limit: float
) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(train, 2, str(tmp_path), SHARDED % (1, "none"), width, batch, limit)
    said = str(caught.value)
    assert re.search(r"out of memory: [.\d]+ [kMG]i?B could not be allocated in \w+ of step \d", said), said
    held = re.search(
        r"Rank \d held parameters ([.\d]+) MB, gradients .*, optimizer states .* on sim:\d; at", said
    )
    weights = 6 * (12 * width**2 + 13 * width) + (64 + 32 + 64 + 2) * width
    assert held is not None and float(held[1]) == pytest.approx(4 * weights / 1e6, rel=0.01)
    assert "Paddle reports: Out of memory error on sim:" in said
    found = run_ranks(train, 2, str(tmp_path), small, width, batch, limit)
    assert all(rank["most"] <= limit for rank in found)
    assert found[0]["loss"] == run_ranks(train, 2, str(tmp_path), small, width, batch)[0]["loss"]


def allocated(folder: str, words: str) -> dict[str, float]:
    """In a rank: the most bytes that Paddle had allocated in an update, as the third one; and what the plan says of
    this rank: of parameters, gradients and states; lent and exchanged besides; of activations."""
    import paddle

    from paddle_dp.axes.meta_init import describe_weights
    from paddle_dp.part import lazily
    from paddle_dp.verbs.forecast import activations, layout_of, sizes_of

    recipe = recipe_of(320, 4, 48)
    trainer = build_trainer(recipe, folder, f"strategy={words}")
    mesh, settings = trainer.mesh, trainer.run.recipe
    with lazily():
        blocks = describe_weights(settings.model.build())
    layout = layout_of(settings, mesh.ranks)
    memory, device = layout.memory(blocks, mesh.rank), int(mesh.device.partition(":")[2])
    for number, batch in enumerate(trainer.loader.read(0)):
        if number == 2:
            paddle.device.synchronize()
            paddle.base.core.device_memory_stat_reset_peak_value("Allocated", device)
        trainer.learner.train_batch(batch)
    settle(trainer)
    return {
        "most": paddle.base.core.device_memory_stat_peak_value("Allocated", device),
        "state": memory.state.total,
        "lent": memory.transient,
        "kept": memory.extra,
        "activations": activations(settings, sizes_of(settings, blocks), layout, blocks, memory) or 0,
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        "{use: data_parallel}",
        "{use: data_parallel, compress: bfloat16}",
        "{use: data_parallel, compress: power_sgd rank 2 after 0 steps}",
        "{use: hybrid}",
        "{use: hybrid, reduce_dtype: bfloat16}",
    ],
)
def test_an_exchange_takes_on_a_device_what_the_plan_says(tmp_path: Path, words: str) -> None:
    for found in run_ranks(allocated, 2, str(tmp_path), words):
        least = found["state"] + found["kept"]
        assert 0.95 * least <= found["most"] <= 1.01 * (least + found["activations"]), found


@pytest.mark.long
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_stage_3_has_on_a_device_what_the_plan_says(tmp_path: Path, ranks: int, prefetch: int) -> None:
    words = f"{{use: hybrid, sharding: {ranks}, sharding_stage: 3, prefetch: {prefetch}}}"
    for found in run_ranks(allocated, ranks, str(tmp_path), words):
        least = found["state"] + found["lent"]
        # The plan takes layers whole, in the order of their weights, and says what there is at most.
        assert 0.95 * least <= found["most"] <= 1.01 * (least + found["activations"])
