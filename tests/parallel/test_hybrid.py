"""Hybrid layouts against one process: losses, gradient norms, weights, held-out numbers, and checkpoints between."""

import numpy as np
import pytest

from tests.ranks import run_ranks

RECIPE = """
model: {{use: {model}, vocab: 32, width: 32, depth: 4, heads: 4, length: 16}}
dataset: {{use: random_tokens, vocab: 32, length: 16, samples: 30, test_samples: 10}}
loss: {{use: cross_entropy}}
optimizer: {{use: adamw, clip: 0.5}}
schedule: {{use: cosine, learning_rate: 3.0e-3, warmup: 3 steps}}
strategy: {strategy}
train: {{length: 10 steps, batch: 8, micro_batches: 2, seed: 3}}
callbacks: []
"""


def train(folder, strategy, until, resume, model="gpt", dropout="exact"):
    """Trains on all ranks, from a checkpoint if there is one to resume, and saves; returns the numbers of each step."""
    from pathlib import Path

    from paddle_dp import checkpoint
    from paddle_dp.mesh import join
    from paddle_dp.recipe import read_recipe
    from paddle_dp.train import Callback
    from paddle_dp.train.build import build

    class Diary(Callback):
        def __init__(self):
            self.rows = []

        def step(self, moment):
            self.rows.append([moment.numbers["loss"], moment.numbers["gradient_norm"]])

    mesh = join(seed=3)
    Path(folder).mkdir(exist_ok=True)
    path = Path(folder) / f"recipe-{mesh.rank}.yaml"
    path.write_text(RECIPE.format(strategy=strategy, model=model))
    trainer = build(
        read_recipe(path, [f"output_dir={folder}", f"train.dropout={dropout}"]),
        mesh,
        "newest" if resume else None,
    )
    diary = Diary()
    trainer.add(diary)
    trainer.fit(until)
    found = trainer.evaluate()
    saved = checkpoint.save(trainer.snapshot(), Path(folder) / "checkpoints", trainer.mesh)
    return {
        "rows": diary.rows,
        "held_out": dict(found.numbers),
        "samples": found.samples,
        "saved": str(saved),
    }


def weights(path):
    from paddle_dp.checkpoint import load

    saved = load(path)
    return {name: saved.read(name) for name in saved.names}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return run_ranks(train, 1, str(folder), "{use: single}", "10 steps", False)[0]


LAYOUTS = [
    (2, "{use: hybrid, tensor: 2}"),
    (2, "{use: hybrid, pipeline: 2}"),
    (4, "{use: hybrid, tensor: 2}"),
    (4, "{use: hybrid, tensor: 2, pipeline: 2}"),
]


@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
def test_a_layout_is_one_process(one, tmp_path, ranks, strategy):
    """30 samples in batches of 8: a last batch of 6, in two micro-batches of 3, shared unequally."""
    many = run_ranks(train, ranks, str(tmp_path), strategy, "10 steps", False)
    for found in many:
        np.testing.assert_allclose(found["rows"], one["rows"], rtol=1e-5)
        assert found["samples"] == 10
        assert found["held_out"]["loss"] == pytest.approx(one["held_out"]["loss"], rel=1e-5)
    ours, truth = weights(many[0]["saved"]), weights(one["saved"])
    assert set(ours) == set(truth)
    for name, value in truth.items():
        np.testing.assert_allclose(ours[name], value, atol=2e-5, err_msg=name)


def test_a_checkpoint_of_one_layout_goes_on_in_others(one, tmp_path):
    """Tensor × pipeline, in mid-epoch to data × sharding, and to one process; and merged, to plain Paddle."""
    folder = str(tmp_path)
    first = run_ranks(train, 4, folder, LAYOUTS[3][1], "3 steps", False)[0]
    check_merged(first["saved"], first["held_out"]["loss"], tmp_path / "model.safetensors")
    rows = first["rows"]
    rows += run_ranks(train, 4, folder, "{use: hybrid, sharding: 2}", "7 steps", True)[0]["rows"]
    rows += run_ranks(train, 1, folder, "{use: single}", "10 steps", True)[0]["rows"]
    np.testing.assert_allclose(rows, one["rows"], rtol=1e-5)


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
    alone = run_ranks(train, 1, str(tmp_path / "one"), "{use: single}", "6 steps", False, "llama")[0]
    many = run_ranks(train, ranks, str(tmp_path / "many"), strategy, "6 steps", False, "llama")
    np.testing.assert_allclose(many[0]["rows"], alone["rows"], rtol=1e-5)
