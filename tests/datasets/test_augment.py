"""RandAugment, TrivialAugment and erasing: their ranges, and random numbers of the loader's seed alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paddle_dp.data import Loader, Sampler
from paddle_dp.datasets._augment import AutoAugment, RandAugment, TrivialAugment, amount, operations
from paddle_dp.datasets.image_folder import Config

PICTURE = Image.fromarray(np.random.default_rng(1).integers(0, 200, (24, 32, 3)).astype(np.uint8))


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def test_ranges_are_torchvisions() -> None:
    """`RandAugment._augmentation_space(31, (24, 32))` and `TrivialAugmentWide._augmentation_space(31)`, 0.20."""
    size = PICTURE.size
    assert amount("shear_x", 30, size) == pytest.approx(0.3) and amount("rotate", 15, size) == 15
    assert amount("translate_x", 30, size) == pytest.approx(150 / 331 * 32)
    assert amount("translate_y", 30, size) == pytest.approx(150 / 331 * 24)
    assert [amount("posterize", n, size) for n in (0, 3, 4, 11, 12, 30)] == [8, 8, 7, 7, 6, 4]
    assert [amount("solarize", n, size) for n in (0, 30)] == [255, 0]
    assert amount("contrast", 10, size) == pytest.approx(0.3)
    assert (
        amount("translate_x", 30, size, is_wide=True) == 32
        and amount("rotate", 30, size, is_wide=True) == 135
    )
    assert (
        amount("posterize", 30, size, is_wide=True) == 2 and amount("shear_y", 30, size, is_wide=True) == 0.99
    )


def test_operations_do_what_their_names_say() -> None:
    do, before = operations(), pixels(PICTURE)
    assert len(do) == 14
    np.testing.assert_array_equal(pixels(do["translate_x"](PICTURE, 3))[:, 3:], before[:, :-3])
    np.testing.assert_array_equal(pixels(do["translate_y"](PICTURE, -2))[:-2], before[2:])
    assert (pixels(do["translate_x"](PICTURE, 3))[:, :3] == 0).all()
    np.testing.assert_array_equal(pixels(do["shear_x"](PICTURE, 0.2))[0], before[0])
    np.testing.assert_array_equal(pixels(do["posterize"](PICTURE, 4)), before & 0xF0)
    np.testing.assert_array_equal(
        pixels(do["solarize"](PICTURE, 100)), np.where(before < 100, before, 255 - before)
    )
    darker, brighter = (pixels(do["brightness"](PICTURE, amount)).mean() for amount in (-0.5, 0.5))
    assert darker < before.mean() < brighter
    assert pixels(do["contrast"](PICTURE, -0.9)).std() < before.std()
    assert np.ptp(pixels(do["color"](PICTURE, -1.0)), axis=2).max() <= 1
    for name, operation in do.items():
        after = operation(PICTURE, 2)
        assert (after.size, after.mode) == (PICTURE.size, "RGB"), name


def test_the_policy_is_torchvisions() -> None:
    """`AutoAugment._get_policies(AutoAugmentPolicy.IMAGENET)`, 0.20: its first rows, its last, and sums over all."""
    policy = AutoAugment()._policy
    assert policy[0] == [("posterize", 0.4, 8), ("rotate", 0.6, 9)]
    assert policy[1] == [("solarize", 0.6, 5), ("autocontrast", 0.6, 0)]
    assert policy[13] == [("invert", 0.6, 0), ("equalize", 1.0, 0)]
    assert policy[18] == [("shear_x", 0.6, 5), ("equalize", 1.0, 0)]
    assert policy[24] == [("equalize", 0.8, 0), ("equalize", 0.6, 0)]
    assert len(policy) == 25
    names = [name for pair in policy for name, _, _ in pair]
    assert (names.count("equalize"), names.count("rotate"), names.count("color")) == (17, 6, 6)
    assert sum(probability for pair in policy for _, probability, _ in pair) == pytest.approx(31.0)
    # Strengths 0 to 9 of `_augmentation_space(10, …)`.
    assert [amount("posterize", m * 30 / 9, PICTURE.size) for m in (5, 6, 7, 8)] == [6, 5, 5, 4]
    assert amount("rotate", 9 * 30 / 9, PICTURE.size) == 30


@pytest.mark.parametrize("make", [lambda: RandAugment(2, 9), TrivialAugment, AutoAugment])
def test_random_numbers_are_pythons(make: Any) -> None:
    def views() -> list[np.ndarray]:
        random.seed(7)
        augment = make()
        return [pixels(augment(PICTURE)) for _ in range(40)]

    for one, other in zip(views(), views(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len({view.tobytes() for view in views()}) > 20


def test_both_signs_and_all_operations_occur() -> None:
    seen: set[tuple[str, bool]] = set()

    def noted(name: str) -> Any:
        def operation(image: Image.Image, amount: float) -> Image.Image:
            seen.add((name, amount < 0))
            return image

        return operation

    augment = RandAugment(3, 30)
    augment._operations = {name: noted(name) for name in augment._operations}
    random.seed(0)
    for _ in range(300):
        augment(PICTURE)
    assert len({name for name, _ in seen}) == 14 and len(seen) == 14 + 9


@pytest.fixture
def root(tmp_path: Path, save_image: Any) -> Path:
    for split in ("train", "val"):
        for name in ("a", "b"):
            for number in range(4):
                save_image(tmp_path / split / name / f"{number}.png", (200, 100, 50))
    return tmp_path


def test_a_rectangle_is_erased_in_training_alone(root: Path) -> None:
    config = Config(path=str(root), size=32, crop=(1.0, 1.0), erase=0.9)
    random.seed(0)
    np.random.seed(0)
    train, shares = config.build("train"), []
    for _ in range(100):
        shares.append((train[0][0] == 0).all(0).mean())
    erased = [share for share in shares if share]
    assert 75 < len(erased) < 100 and 0.01 < min(erased) < max(erased) < 0.36
    assert not (config.build("test")[0][0] == 0).all(0).any()


def test_an_erased_rectangle_is_filled_with_normal_noise(root: Path) -> None:
    for file in root.rglob("*.png"):
        Image.new("RGB", (40, 30), (200, 100, 50)).save(file)
    config = Config(path=str(root), size=32, crop=(1.0, 1.0), erase=0.9, erase_fill="noise", flip=0.0)
    random.seed(0)
    np.random.seed(0)
    train, plain = (
        config.build("train"),
        Config(path=str(root), size=32, crop=(1.0, 1.0), flip=0.0).build("test")[0][0],
    )
    noise, shares = [], []
    for _ in range(100):
        image = train[0][0]
        assert image.dtype == np.float32
        changed = image != plain
        assert (changed.all(0) == changed.any(0)).all()  # all channels of a pixel, or none
        noise.append(image[changed])
        shares.append(changed.mean())
    noise = np.concatenate(noise)
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    assert 75 < sum(share > 0 for share in shares) < 100 and max(shares) < 0.36


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_a_moved_image_is_resampled_as_the_setting_says(interpolation: str) -> None:
    resample = Image.Resampling[interpolation.upper()]
    turned = operations(interpolation)["rotate"](PICTURE, 20.0)
    assert (pixels(turned) == pixels(PICTURE.rotate(20.0, resample, fillcolor=0))).all()
    sheared = operations(interpolation)["shear_x"](PICTURE, 0.2)
    affine = PICTURE.transform(
        PICTURE.size, Image.Transform.AFFINE, [1, 0.2, 0, 0, 1, 0], resample, fillcolor=0
    )
    assert (pixels(sheared) == pixels(affine)).all()
    if interpolation != "nearest":
        assert (pixels(turned) != pixels(operations()["rotate"](PICTURE, 20.0))).any()


@pytest.mark.processes
def test_workers_and_ranks_see_the_same_images(root: Path) -> None:
    data = Config(path=str(root), size=16, augment="trivial", erase=0.5, erase_fill="noise").build("train")
    sampler = Sampler(len(data), 4, seed=2)
    expected = [batch.micro_batches[0].inputs.numpy() for batch in Loader(data, sampler).read(1)]
    with Loader(data, sampler, num_workers=2) as loader:
        got = [batch.micro_batches[0].inputs.numpy() for batch in loader.read(1)]
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_array_equal(one, other)


def test_settings_out_of_range_are_refused() -> None:
    from paddle_dp.part import read_part

    for settings in ({"augment": "random"}, {"augment_strength": 31}, {"augment_count": 0}, {"erase": 1.5}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            read_part("datasets", {"use": "image_folder", "path": "x", **settings})
