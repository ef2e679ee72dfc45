"""Mixup, CutMix, RandAugment and random erasing of image files: one process's training on 2 and 3 ranks with workers,
and bit-equal after a resume in mid-epoch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paddle_dp.checkpoint import load, newest
from paddle_dp.datasets.digits import Config as Digits
from tests.house.recipes import small_recipe
from tests.house.runs import events
from tests.jobs import train_in_forks

STEPS = 24


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of 487 digits in colours as PNG files, 90 of them held out."""
    folder = tmp_path_factory.mktemp("digits")
    colours = np.random.default_rng(5).uniform(0.3, 1.0, (577, 3))
    for split, (first, last) in {"train": (0, 487), "test": (487, 577)}.items():
        lines = []
        digits = Digits(as_image=True, size=16, channels=3, held_out=0.01).build("train")
        for i in range(first, last):
            pixels, digit = digits[i]
            coloured = (255 * pixels.transpose(1, 2, 0) * colours[i]).astype(np.uint8)
            Image.fromarray(coloured).save(folder / f"{i}.png")
            lines.append(f"{i}.png {digit}\n")
        (folder / f"{split}.txt").write_text("".join(lines))
    path = folder / "recipe.yaml"
    images = (
        f"image_list, path: {folder}, train: train.txt, test: test.txt, size: 16, augment: rand, erase: 0.5"
    )
    path.write_text(small_recipe(
        "length: 24 steps, batch: 50, micro_batches: 2", dataset=images, mix="{mixup: 0.4, cutmix: 1.0}",
        model="convnet, channels: 3, widths: [8, 16, 16], classes: 10, norm: batch, activation: gelu, pool: mean",
        loss="cross_entropy, label_smoothing: 0.1", optimizer="momentum, weight_decay: 5e-4",
        schedule="cosine, learning_rate: 0.05, warmup: 4 steps", strategy="data_parallel, sync_batch_norm: true",
        callbacks="[{use: metrics, every: 1 step}, {use: evaluate, every: 2 epochs}, "
        "{use: checkpoint, every: 7 steps, keep: 9}]",
    ))  # fmt: skip
    return path


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in events(run, "step")]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_see_one_process_pictures_and_a_resume_goes_on_bit_by_bit(recipe: Path, tmp_path: Path) -> None:
    train_in_forks(recipe, tmp_path / "1", 1)
    train_in_forks(recipe, tmp_path / "2", 2, "loader.num_workers=2")
    train_in_forks(recipe, tmp_path / "3", 3, "loader.num_workers=1")
    alone, held_out = losses(tmp_path / "1"), json.loads((tmp_path / "1/evaluation.json").read_text())
    assert len(alone) == STEPS and alone[-1] < alone[0]
    for ranks in ("2", "3"):
        np.testing.assert_allclose(losses(tmp_path / ranks), alone, rtol=0, atol=1e-6)
        numbers = json.loads((tmp_path / ranks / "evaluation.json").read_text())
        assert numbers["acc1"] == held_out["acc1"] and numbers["samples"] == 90
        assert numbers["loss"] == pytest.approx(held_out["loss"], abs=1e-6)
    for cut in (14, 21):  # an epoch has ten batches
        out = tmp_path / f"resumed{cut}"
        saved = tmp_path / "2" / "checkpoints" / f"step-{cut:08d}"
        train_in_forks(recipe, out, 2, "loader.num_workers=1", resume=str(saved))
        assert losses(out) == losses(tmp_path / "2")[cut:]
        one, other = (load(newest(run / "checkpoints")) for run in (out, tmp_path / "2"))
        assert one.state["progress"] == other.state["progress"] and one.state["progress"]["step"] == STEPS
        for name in one.names:
            np.testing.assert_array_equal(one.read(name), other.read(name), err_msg=name)
