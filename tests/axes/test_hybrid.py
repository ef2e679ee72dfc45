"""Hybrid layouts against one process: losses, gradient norms, weights, held-out numbers, and checkpoints between."""

import numpy as np
import pytest

from tests.parity import assert_same, train, truth, weights
from tests.ranks import run_ranks

LAYOUTS = [
    (2, "{use: hybrid, tensor: 2}"),
    (2, "{use: hybrid, pipeline: 2}"),
    (4, "{use: hybrid, tensor: 2}"),
    (4, "{use: hybrid, tensor: 2, pipeline: 2}"),
]


@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
def test_a_layout_is_one_process(tmp_path, ranks, strategy):
    assert_same(run_ranks(train, ranks, str(tmp_path), strategy), truth())


def test_a_checkpoint_of_one_layout_goes_on_in_others(tmp_path):
    """Tensor × pipeline, in mid-epoch to data × sharding, and to one process; and merged, to plain Paddle."""
    folder = str(tmp_path)
    first = run_ranks(train, 4, folder, LAYOUTS[3][1], "3 steps")[0]
    check_merged(first["saved"], first["held_out"]["loss"], tmp_path / "model.safetensors")
    rows = first["rows"]
    rows += run_ranks(train, 4, folder, "{use: hybrid, sharding: 2}", "7 steps", resume=True)[0]["rows"]
    rows += run_ranks(train, 1, folder, "{use: single}", resume=True)[0]["rows"]
    np.testing.assert_allclose(rows, truth()["rows"], rtol=1e-5)


def check_merged(checkpoint, held_out, path):
    """The merged file is the model's state dict in plain Paddle: its scores are the model's, and so its loss."""
    import paddle
    from safetensors.paddle import load_file

    from models.gpt import Config
    from paddle_dp.checkpoint import merge
    from paddle_dp.datasets.random_tokens import Config as Tokens

    merge(checkpoint, path)
    model = Config(vocab=32, width=32, depth=4, heads=4, length=16).build()
    missing, unexpected = model.set_state_dict(load_file(path))
    assert not missing
    assert not unexpected
    model.eval()
    texts = Tokens(vocab=32, length=16, samples=30, test_samples=10).build("test")
    inputs, targets = (paddle.to_tensor(part) for part in texts.take(np.arange(10)))
    with paddle.no_grad():
        scores = model(inputs)
        assert float(paddle.nn.functional.cross_entropy(scores, targets)) == pytest.approx(held_out, rel=1e-6)
    saved = {n.removeprefix("model/"): v for n, v in weights(checkpoint).items() if n.startswith("model/")}
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), saved[name], err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "strategy"), [*LAYOUTS, (8, "{use: hybrid, tensor: 2, pipeline: 2}")])
def test_llama_in_the_same_layouts(tmp_path, ranks, strategy):
    many = run_ranks(train, ranks, str(tmp_path), strategy, "6 steps", model="llama")
    np.testing.assert_allclose(many[0]["rows"], truth("6 steps", model="llama")["rows"], rtol=1e-5)
