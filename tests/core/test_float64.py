"""Under `train.precision: float64` every layout computes one process's gradients, to what float64 rounds away."""

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_dp.assembly.build import build
from paddle_dp.core.precision import default_dtype, everything_in_float64
from paddle_dp.learner import Precision, Task
from paddle_dp.mesh import join
from paddle_dp.recipe import read_recipe
from tests.house.recipes import small_recipe
from tests.house.training import untried
from tests.ranks import run_ranks

BOUND = 1e-12  # relative; equal computations in another order were seen to differ by 1e-13 at most


def gradients(folder, layouts, model, depth, precision="float64"):
    """For each layout: loss, gradient norm and this rank's parts of the gradients, step by step; the held-out loss.

    13 samples in batches of 8: two micro-batches of 4, then two of 3 and 2, which ranks share unequally.
    """
    untried()
    mesh, found = join(seed=3), []
    path = Path(folder) / f"recipe-{mesh.ranks}-{mesh.rank}.yaml"
    path.write_text(small_recipe(
        f"length: 10 steps, batch: 8, micro_batches: 2, seed: 3, precision: {precision}", strategy="single",
        model=f"{model}, vocab: 32, width: 16, depth: {depth}, heads: 4, length: 8", callbacks="[]",
        dataset="random_tokens, vocab: 32, length: 8, samples: 13, test_samples: 5",
        optimizer="adamw, clip: 0.5", schedule="cosine, learning_rate: 3.0e-3, warmup: 3 steps",
    ))  # fmt: skip
    for layout in layouts:
        join(seed=3)
        words = [f"strategy={layout}", f"output_dir={folder}"]
        trainer = build(read_recipe(path, words), mesh)
        learner, steps, parts = trainer.learner, [], {}
        step = learner.update

        def recorded(learner=learner, parts=parts, step=step):
            for name, p in learner.placed.named_parameters():
                if p.grad is not None:
                    shard = learner.placed.placements.placement_of(p).shard
                    place = [shard.dim, shard.rank] if shard else [0, 0]
                    parts[name] = [place, p.grad.numpy().tolist(), str(p.grad.dtype)]
            step()

        learner.update = recorded
        for batch in trainer.loader.read(0):
            metrics = learner.train_batch(batch, collect_metrics=True)
            steps.append([metrics["loss"], metrics["gradient_norm"], dict(parts)])
            parts.clear()
        found.append([steps, trainer.evaluate().numbers["loss"], dtypes(learner)])
    return found


def dtypes(learner):
    """Every floating type among parameters, buffers and states of the optimizer."""
    tensors = [*learner.model.state_dict().values(), *learner.optimizer.state_dict().values()]
    kinds = {str(t.dtype) for t in tensors if hasattr(t, "dtype") and t.is_floating_point()}
    return sorted(kinds | {str(learner.optimizer._global_learning_rate().dtype)})


def whole(parts):
    """A whole gradient from its parts on the ranks: equal places are equal, others are joined."""
    held = {tuple(place): np.array(values) for place, values, _ in parts}
    dim = next(iter(held))[0]
    return np.concatenate([held[key] for key in sorted(held)], axis=dim)


def assert_same(many, one, bound=BOUND):
    """The ranks' records of one layout against one process's."""
    for number, (loss, norm, truth) in enumerate(one[0]):
        assert many[0][0][number][0] == pytest.approx(loss, rel=bound)
        for rank in many:
            assert rank[0][number][1] == pytest.approx(norm, rel=bound)
        for name, of_one in truth.items():
            parts = [rank[0][number][2][name] for rank in many if name in rank[0][number][2]]
            mine, true = whole(parts), whole([of_one])
            apart = np.linalg.norm(mine - true) / np.linalg.norm(true)
            assert apart < bound, (number, name, apart)
    assert many[0][1] == pytest.approx(one[1], rel=bound)


def together(ranks, layouts, tmp_path, model, depth):
    one = run_ranks(gradients, 1, str(tmp_path), ["{use: single}"], model, depth)[0][0]
    assert one[2] == ["paddle.float64"]
    many = run_ranks(gradients, ranks, str(tmp_path), layouts, model, depth)
    for number, layout in enumerate(layouts):
        found = [rank[number] for rank in many]
        assert all(kinds == ["paddle.float64"] for *_, kinds in found), layout
        assert_same(found, one)


TWO = [
    "{use: data_parallel, recompute: full}",
    "{use: hybrid, tensor: 2}",
    "{use: hybrid, tensor: 2, sequence_parallel: true}",
    "{use: hybrid, pipeline: 2}",
    "{use: hybrid, sharding: 2}",
    "{use: hybrid, sharding: 2, sharding_stage: 3}",
    "{use: hybrid, sequence: 2}",
]
FOUR = [
    "{use: data_parallel}",
    "{use: hybrid, tensor: 2, pipeline: 2}",
    "{use: hybrid, pipeline: 2, pipeline_schedule: interleaved}",
    "{use: hybrid, tensor: 2, sharding: 2}",
    "{use: hybrid, pipeline: 2, sharding: 2}",
]


def test_every_layout_on_two_ranks(tmp_path):
    """With dropout, whose masks are one process's; and tied weights: an embedding cut by words is the head, too."""
    together(2, TWO, tmp_path, "gpt, dropout: 0.2", 2)


@pytest.mark.long
def test_layouts_on_four_ranks(tmp_path):
    together(4, FOUR, tmp_path, "llama", 4)


def test_the_model_is_the_float32_one_cast():
    """The same numbers, the same tensors; whole numbers stay what they are."""
    paddle.seed(1)
    model = paddle.nn.Sequential(paddle.nn.Linear(3, 2), paddle.nn.BatchNorm(2))
    model.register_buffer("seen", paddle.arange(3))
    before = {name: (tensor, tensor.numpy()) for name, tensor in model.state_dict().items()}
    task = Task(model=model, loss=None, optimizer=None, precision=Precision(dtype="float64"))
    for name, tensor in task.model.state_dict().items():
        assert tensor is before[name][0]
        assert tensor.dtype == (paddle.int64 if name == "seen" else paddle.float64)
        np.testing.assert_array_equal(tensor.numpy(), before[name][1])


def test_the_default_type_comes_back_after_an_error():
    seen = []

    def fail():
        seen.append(paddle.zeros([1]).dtype)
        raise KeyError

    with pytest.raises(KeyError), default_dtype("float64"):
        fail()
    assert seen == [paddle.float64]
    assert paddle.zeros([1]).dtype == paddle.float32


@pytest.mark.parametrize("how", ["paddle.cast", "x.astype", "x.cast"])
@pytest.mark.parametrize("dtype", ["float32", paddle.float32, np.float32, np.dtype("float32")])
def test_a_models_cast_to_float32_rounds_nothing_in_float64(how, dtype):
    """Position embeddings that PaddleClas resizes in float32: a proof in float64 took the rounding for a fault."""
    x = paddle.to_tensor([1 / 3], "float64")
    convert = {"paddle.cast": paddle.cast, "x.astype": paddle.Tensor.astype, "x.cast": paddle.Tensor.cast}
    with everything_in_float64():
        inside = {"paddle.cast": paddle.cast, "x.astype": paddle.Tensor.astype, "x.cast": paddle.Tensor.cast}
        assert inside[how](x, dtype).dtype == paddle.float64
        for other in ("float16", paddle.bool, np.int64, "int32", paddle.bfloat16):
            assert inside[how](x, other).dtype == convert[how](x, other).dtype
        assert inside[how](x.astype("int64"), dtype).dtype == paddle.float32
    assert convert[how](x, dtype).dtype == paddle.float32
