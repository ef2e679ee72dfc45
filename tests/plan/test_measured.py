"""What a run allocates and sends is what the plan says of it: copies, errors, rounded gradients, a server."""

from __future__ import annotations

import gc
import os
import time
import tracemalloc
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.plan.exchange import sent
from tests.house.recipes import small_recipe
from tests.ranks import run_ranks

WIDTH, DEPTH = 128, 4
RECIPE = small_recipe(
    "length: 8 steps, batch: 8, device: cpu", schedule="constant, learning_rate: 1.0e-3", callbacks="[]",
    model=f"gpt, vocab: 32, width: {WIDTH}, depth: {DEPTH}, heads: 4, length: 8", strategy="single",
    dataset="random_tokens, vocab: 32, length: 8, samples: 64",
)  # fmt: skip
WARM, STEPS = 3, 4  # updates before those that are measured, and these: one period of the local learners


def allocated() -> int:
    """Bytes that Paddle has allocated on this host for tensors."""
    import paddle

    return int(paddle.base.core.host_memory_stat_current_value("Allocated", 0))


def measured(
    folder: str,
    strategy: str,
    late: int = -1,
    overrides: Sequence[str] = (),
    warm: int = WARM,
    steps: int = STEPS,
) -> dict[str, float]:
    """In a rank: the most bytes of tensors, and of other memory, of the updates behind the first ones; what is sent in
    one; and what the plan says. Rank `late` is late in each."""
    import paddle

    from paddle_dp.assembly.build import build
    from paddle_dp.axes.meta_init import describe_weights
    from paddle_dp.mesh import join
    from paddle_dp.mesh.transport import traffic
    from paddle_dp.part import lazily
    from paddle_dp.recipe import read_recipe
    from paddle_dp.verbs.forecast import activations, between, layout_of, sizes_of

    path = Path(folder) / f"recipe-{os.getpid()}.yaml"
    path.write_text(RECIPE)
    recipe = read_recipe(path, [f"strategy={strategy}", f"output_dir={folder}", *overrides])
    mesh = join(seed=3, servers=recipe.strategy.config.servers)
    gc.collect()
    before = allocated()
    trainer = build(recipe, mesh)
    stat = paddle.base.core
    for number, batch in enumerate(trainer.loader.read(0)):
        if number == warm:
            gc.collect()
            mesh.wait("the measurement")
            stat.host_memory_stat_reset_peak_value("Allocated", 0)
            tracemalloc.start()
            began = traffic.sent
        if mesh.rank == late:
            time.sleep(0.3)
        trainer.learner.train_batch(batch)
        if number == warm + steps - 1:
            break
    traced, end = tracemalloc.get_traced_memory()[1], traffic.sent
    tracemalloc.stop()
    mesh.wait("the other ranks")  # to which new parameters are still on their way
    with lazily():
        blocks = describe_weights(recipe.model.build())
    layout = layout_of(recipe, mesh.ranks)
    memory = layout.memory(blocks, mesh.rank)
    transfers = sent(blocks, layout, mesh.rank, recipe.train.micro_batches, between(recipe, layout))
    planned = sum(each.bytes for each in transfers)
    return {
        "tensors": stat.host_memory_stat_peak_value("Allocated", 0) - before,
        "traced": traced,
        "sent": (end - began) / steps,
        "state": memory.state.total,
        "kept": memory.extra,
        "lent": memory.transient,
        "activations": activations(recipe, sizes_of(recipe, blocks), layout, blocks, memory) or 0.0,
        "planned": planned,
        "weights": memory.state.parameters,
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    [
        "{use: data_parallel}",
        "{use: data_parallel, exchange: after}",
        "{use: data_parallel, exchange: per_parameter}",
        "{use: data_parallel, exchange: bucketed, last_comm_buffer_size: 25 MB}",
        "{use: hybrid, reduce_dtype: bfloat16}",
        "{use: hybrid, sharding: 2, sharding_stage: 2, reduce_dtype: bfloat16}",
        "{use: data_parallel, compress: bfloat16}",
        "{use: data_parallel, compress: power_sgd rank 2 after 0 steps}",
        "{use: local_sgd, every: 4 steps}",
        "{use: local_sgd, every: 4 steps, outer: {}}",
    ],
)
def test_two_ranks_hold_and_send_what_the_plan_says(strategy: str, tmp_path: Path) -> None:
    many = run_ranks(measured, 2, str(tmp_path), strategy)
    for found in many:
        least = found["state"] + found["kept"]
        assert 0.97 * least <= found["tensors"] <= 1.05 * (least + found["activations"]), found
    sends = np.mean([found["sent"] for found in many])
    planned = np.mean([found["planned"] for found in many])
    assert planned <= sends <= 1.01 * planned + 2000, (
        planned,
        sends,
    )  # beside it norms and the ends of messages


O2 = "{dtype: bfloat16, level: O2}"


@pytest.mark.parametrize(
    ("sequence_parallel", "precision"),
    [
        ("true", "bfloat16"),
        ("false", O2),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("false", "float32"), ("true", "float32"), ("false", "bfloat16"), ("true", O2))
        ),
    ],
)
def test_cut_layers_send_what_the_plan_says(sequence_parallel: str, precision: str, tmp_path: Path) -> None:
    """q, k and v read one input, gate and up another: each is sent once, in float32 where bfloat16 is emulated."""
    strategy = f"{{use: hybrid, tensor: 2, sequence_parallel: {sequence_parallel}, recompute: full}}"
    overrides = (
        f"model={{use: llama, vocab: 32, width: {WIDTH}, depth: 2, heads: 4, length: 8}}",
        f"train.precision={precision}",
        "train.micro_batches=2",
    )
    for found in run_ranks(measured, 2, str(tmp_path), strategy, -1, overrides, 1, 1):
        assert found["planned"] <= found["sent"] <= 1.05 * found["planned"], found  # beside it a split loss


AXES = ("data", "sharding", "sequence", "pipeline", "tensor")


@pytest.mark.long
@pytest.mark.parametrize(
    ("axes", "stage"),
    [
        (pair, stage)
        for pair in combinations(AXES, 2)
        for stage in ((1, 2, 3) if "sharding" in pair else (1,))
    ],
    ids=str,
)
def test_four_ranks_of_two_axes_send_what_the_plan_says(
    axes: tuple[str, str], stage: int, tmp_path: Path
) -> None:
    """The sequence axis counted all heads beside the tensor axis, where a rank has half of them, and stage 2 the
    replicas' sums of the last micro-batch only."""
    strategy = f"{{use: hybrid, {axes[0]}: 2, {axes[1]}: 2, sharding_stage: {stage}}}"
    ranks = run_ranks(measured, 4, str(tmp_path), strategy, -1, ("train.micro_batches=2",))
    sends, planned = (np.mean([rank[key] for rank in ranks]) for key in ("sent", "planned"))
    assert 0.998 * planned <= sends <= 1.02 * planned + 4000, (
        planned,
        sends,
    )  # beside it norms and a split loss


ATTENTIVE = (
    "model={use: gpt, vocab: 32, width: 64, depth: 3, heads: 4, length: 256}",
    "dataset={use: random_tokens, vocab: 32, length: 256, samples: 64}",
    "train.batch=4",
)


def attentive(folder: Path, ranks: int, strategy: str) -> list[dict[str, float]]:
    """What ranks measure in the second update of a GPT that keeps its scores."""
    return run_ranks(measured, ranks, str(folder), strategy, -1, ATTENTIVE, 1, 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return attentive(tmp_path_factory.mktemp("whole"), 1, "{use: single}")[0]


def test_a_sequence_rank_keeps_the_share_that_the_plan_says(whole: dict[str, float], tmp_path: Path) -> None:
    """Of attention without flash half of the scores are on each of 2 ranks: its heads see all tokens. A quarter was
    counted."""
    for rank in attentive(tmp_path, 2, "{use: hybrid, sequence: 2}"):
        kept, planned = (
            (rank[key] - state) / (whole[key] - other)
            for key, state, other in (
                ("tensors", rank["state"] + rank["kept"], whole["state"]),
                ("activations", 0, 0),
            )
        )
        assert kept == pytest.approx(planned, rel=0.1), (kept, planned)


def test_every_second_block_is_computed_again_as_the_plan_says(
    whole: dict[str, float], tmp_path: Path
) -> None:
    """Of an embedding, three blocks and a head these are blocks 1 and 3; the plan counted block 2."""
    how = "recompute: every 2 blocks"
    (half,) = attentive(tmp_path, 1, f"{{use: single, {how}}}")
    kept = (half["tensors"] - half["state"]) / (whole["tensors"] - whole["state"])
    planned = half["activations"] / whole["activations"]
    assert kept == pytest.approx(planned, rel=0.15), (kept, planned)
    for rank in attentive(tmp_path, 2, f"{{use: hybrid, tensor: 2, {how}}}"):
        assert rank["planned"] <= rank["sent"] <= 1.05 * rank["planned"], rank


@pytest.mark.long
def test_a_server_has_what_waits_for_a_late_worker_and_a_worker_no_more_than_it_says(tmp_path: Path) -> None:
    server, *workers = run_ranks(measured, 4, str(tmp_path), "{use: parameter_server}", 3)
    assert server["lent"] == 2 * server["weights"]  # of the two workers that are in time
    assert 0.97 * server["lent"] <= server["traced"] <= 1.03 * (server["lent"] + server["weights"])
    assert 0.97 * server["state"] <= server["tensors"] <= 1.03 * server["state"]
    assert server["sent"] == pytest.approx(server["planned"], rel=0.01)
    for worker in workers:
        assert worker["tensors"] <= 1.05 * (worker["state"] + worker["activations"])
        assert worker["traced"] <= 1.03 * worker["weights"]  # pulled, when the gradients have left
        assert worker["sent"] == pytest.approx(worker["planned"], rel=0.01)


def test_one_process_allocates_what_its_replicas_hold() -> None:
    import paddle
    from paddle import nn

    from paddle_dp.axes.meta_init import describe_weights
    from paddle_dp.batch import Batch, MicroBatch
    from paddle_dp.losses.mean_squared_error import Config as SquaredError
    from paddle_dp.mesh import Mesh
    from paddle_dp.part import read_part
    from paddle_dp.plan.memory import Widths
    from tests.house.learners import task_of

    paddle.set_device("cpu")
    gc.collect()
    before, stat = allocated(), paddle.base.core
    strategy = read_part("strategies", {"use": "replicas", "count": 3})
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))
    task = task_of(model, SquaredError().build(), "Momentum", samples=lambda: paddle.zeros([2, 256]))
    learner: Any = strategy.build(Mesh.alone()).place(task)
    batch = Batch((MicroBatch(paddle.ones([3, 256]), paddle.ones([3, 256]), 3, 0),), 3, 0, 0)
    learner.train_batch(batch)
    stat.host_memory_stat_reset_peak_value("Allocated", 0)
    learner.train_batch(batch)
    most = stat.host_memory_stat_peak_value("Allocated", 0) - before
    layout = strategy.config.layout(1)
    plan = layout.memory(describe_weights(learner.model), 0)
    assert layout.widths == Widths()  # of AdamW; momentum has half of its states
    total = plan.state.parameters + plan.state.gradients + plan.state.optimizer / 2
    assert total <= most <= 1.02 * total, (total, most)
