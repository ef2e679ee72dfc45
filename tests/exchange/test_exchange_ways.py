"""Every way to exchange gradients under data_parallel is one process; compressed ones are the same on all ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddle_dp.errors import RecipeError, UsageError
from paddle_dp.part import read_part
from paddle_dp.proof.verify import verify
from paddle_dp.recipe import read_recipe
from tests.house.training import build_trainer, kill_after
from tests.parity import (
    ADAMW,
    QUICK,
    RECIPE,
    assert_same,
    assert_same_weights,
    train,
    train_each,
    truth,
    weights,
)
from tests.ranks import run_ranks

DIGITS = Path(__file__).parents[2] / "configs/digits_mlp.yaml"
SMALL = "comm_buffer_size: 20 KB, last_comm_buffer_size: 4 KB"  # of 200 KB
WHOLE = [
    "{use: data_parallel, exchange: after}",
    "{use: data_parallel, exchange: per_parameter, recompute: every 2 blocks}",
    f"{{use: data_parallel, exchange: bucketed, {SMALL}}}",
    f"{{use: data_parallel, exchange: bucketed, recompute: full, {SMALL}}}",
]
COMPRESSED = ["bfloat16", "float16", "power_sgd rank 2 after 2 steps"]


@pytest.mark.parametrize(
    ("ranks", "strategies", "how"),
    [
        (2, WHOLE[1:2], QUICK),
        pytest.param(2, WHOLE, {}, marks=pytest.mark.long),
        pytest.param(3, WHOLE, {}, marks=pytest.mark.long),
    ],
)
def test_each_way_is_one_process(ranks, strategies, how, tmp_path):
    for many in zip(*run_ranks(train_each, ranks, str(tmp_path), strategies, **how), strict=True):
        assert_same(many, truth(**how))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("compress", COMPRESSED)
def test_two_compressed_runs_have_the_same_bits_on_all_ranks_and_go_on_from_a_checkpoint(
    compress, ranks, tmp_path
):
    strategy = f"{{use: data_parallel, compress: {compress}, recompute: every 2 blocks}}"
    first, again = (run_ranks(train, ranks, str(tmp_path / name), strategy) for name in ("first", "again"))
    assert all(
        found["rows"] == first[0]["rows"] == other["rows"] for found, other in zip(first, again, strict=True)
    )
    run_ranks(train, ranks, str(tmp_path / "parts"), strategy, "4 steps")
    parts = run_ranks(train, ranks, str(tmp_path / "parts"), strategy, resume=True)
    assert first[0]["rows"][4:] == parts[0]["rows"]
    assert_same_weights(parts[0]["saved"], first[0]["saved"])
    assert any("/error/" in name for name in weights(first[0]["saved"]))


def train_or_die(folder: str, strategy: str, killed_after: int = 0, resume: bool = False) -> None:
    """In a rank: trains 10 steps, saving every 3; or rank 1 kills itself after a step."""
    recipe = RECIPE.format(strategy=strategy, model="gpt", optimizer=ADAMW, dropout="exact")
    trainer = build_trainer(recipe, folder, "callbacks=[{use: checkpoint, every: 3 steps}]", resume=resume)
    kill_after(trainer, killed_after, rank=1)
    trainer.fit()


@pytest.mark.long
@pytest.mark.parametrize(
    "way", ["exchange: after", "exchange: per_parameter", *(f"compress: {c}" for c in COMPRESSED)]
)
def test_after_kill_9_it_goes_on_bit_for_bit(way, tmp_path):
    from paddle_dp.checkpoint import newest

    strategy, ends = f"{{use: data_parallel, {way}}}", []
    for name, killed_after in (("whole", 0), ("broken", 8)):
        (folder := tmp_path / name).mkdir()
        if killed_after:
            with pytest.raises(AssertionError):
                run_ranks(train_or_die, 2, str(folder), strategy, killed_after)
            assert newest(folder / "checkpoints").name == "step-00000006"
        run_ranks(train_or_die, 2, str(folder), strategy, resume=bool(killed_after))
        ends.append(str(newest(folder / "checkpoints")))
    assert_same_weights(*ends)


@pytest.mark.long
@pytest.mark.parametrize("compress", COMPRESSED)
def test_a_compressed_run_goes_on_on_other_ranks_and_without_compression(compress, tmp_path):
    compressed = f"{{use: data_parallel, compress: {compress}}}"
    first = run_ranks(train, 2, str(tmp_path), compressed, "4 steps")
    owed = {name: value for name, value in weights(first[0]["saved"]).items() if "/error/" in name}
    assert {name.split("/")[1] for name in owed} == {"0", "1"} and any(v.any() for v in owed.values())
    third = run_ranks(train, 3, str(tmp_path), compressed, "7 steps", resume=True)
    now = {name: value for name, value in weights(third[0]["saved"]).items() if "/error/" in name}
    assert {name.split("/")[1] for name in now} == {"0", "1", "2"}
    last = run_ranks(train, 2, str(tmp_path), "{use: hybrid, sharding: 2}", resume=True)
    assert len(last[0]["rows"]) == 3
    assert not any("/error/" in name for name in weights(last[0]["saved"]))


@pytest.mark.long
def test_the_first_updates_of_power_sgd_exchange_whole_gradients(tmp_path):
    """Losses are those of before each update: the third is the first that an approximation could change by the next."""
    rows = {}
    for name, compress in (("whole", "none"), ("after", "power_sgd rank 1 after 2 steps")):
        strategy = f"{{use: data_parallel, compress: {compress}}}"
        rows[name] = run_ranks(train, 2, str(tmp_path / name), strategy, "5 steps")[0]["rows"]
    assert rows["whole"][:2] == rows["after"][:2]
    losses = {name: [loss for loss, _ in of] for name, of in rows.items()}
    assert losses["whole"][2] == losses["after"][2] and losses["whole"][3] != losses["after"][3]


def told_of_large_gradients(compress: str) -> list[str]:
    """In a rank: what three updates say whose gradients float16 cannot hold."""
    import contextlib
    import io

    import paddle

    from paddle_dp.batch import Batch, MicroBatch
    from paddle_dp.losses.mean_squared_error import Config as SquaredError
    from paddle_dp.mesh import join
    from tests.house.learners import task_of

    mesh = join(seed=0)
    model = paddle.nn.Linear(2, 1)
    task = task_of(model, SquaredError().build(), "SGD", 1e-09)
    learner = read_part("strategies", {"use": "data_parallel", "compress": compress}).build(mesh).place(task)
    inputs, targets = paddle.full([1, 2], 1e3), paddle.full([1, 1], 1e3)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for _ in range(3):
            batch = Batch((MicroBatch(inputs, targets, 1, mesh.rank),), 2, 0, 0)
            learner.train_batch(batch, collect_metrics=True)
    return said.getvalue().splitlines()


@pytest.mark.long
def test_what_float16_cannot_hold_is_said_once_by_name_and_step():
    first, second = run_ranks(told_of_large_gradients, 2, "float16")
    assert len(first) == 1 and not second
    assert first[0].startswith("step 1, or before it: the gradient of 'weight' has numbers above 65504")
    assert run_ranks(told_of_large_gradients, 2, "bfloat16") == [[], []]


def test_a_compressed_gradient_has_no_other_exchange():
    with pytest.raises(RecipeError, match=r"compress: power_sgd rank 4.* have their own: leave it out"):
        read_part("strategies", {"use": "data_parallel", "exchange": "after", "compress": "power_sgd"})


def test_a_push_sends_what_lies_on_a_host():
    recipe = read_recipe(DIGITS, ["strategy.exchange=pushed"])
    with pytest.raises(UsageError, match=r"strategy.exchange=pushed.*accelerators"):
        recipe.strategy.refuse(recipe, 2, "gpu")


def test_verify_says_at_the_door_what_is_not_one_process():
    with pytest.raises(
        UsageError, match=r"nothing was compared: strategy.compress=bfloat16 does not.*compress=none"
    ):
        verify(DIGITS, ["strategy={use: data_parallel, compress: bfloat16}"])


@pytest.mark.long
@pytest.mark.parametrize(
    "axes", ["data: 2", "sharding: 2", "sharding: 2, sharding_stage: 2", "sharding: 2, sharding_stage: 3"]
)
def test_gradients_are_reduced_in_the_dtype_that_is_asked_for(axes, tmp_path):
    wide, narrow = (f"{{use: hybrid, {axes}, reduce_dtype: {dtype}}}" for dtype in ("float32", "bfloat16"))
    assert_same(run_ranks(train, 2, str(tmp_path / "wide"), wide), truth())
    first, again = (run_ranks(train, 2, str(tmp_path / name), narrow) for name in ("first", "again"))
    assert first[0]["rows"] == first[1]["rows"] == again[0]["rows"]
    apart = np.abs(np.array(first[0]["rows"]) / truth()["rows"] - 1).max()
    assert 2**-16 < apart < 2**-7
