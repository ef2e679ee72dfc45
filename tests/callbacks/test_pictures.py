"""Samples as pictures: any layout, any range, and what is no picture."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_dp.callbacks.dashboard.mesh_picture import picture


@pytest.mark.parametrize("shape", [(80, 90), (1, 80, 90), (3, 80, 90), (4, 80, 90), (80, 90, 1), (80, 90, 3)])
def test_every_layout_is_shown_upright(shape: tuple[int, ...]) -> None:
    sample = np.zeros(shape, "float32")
    sample[(0, 5) if shape[0] == 80 else (slice(None), 0, 5)] = 1.0
    shown = picture(sample)
    assert shown is not None and shown.shape == (80, 90, 3) and shown.dtype == np.uint8
    assert shown[0, 5].tolist() == [255, 255, 255] and shown[5, 0].tolist() == [0, 0, 0]


def test_normalized_numbers_fill_the_range() -> None:
    shown = picture(np.linspace(-2, 2, 64 * 64).reshape(64, 64))
    assert shown is not None and shown.min() == 0 and shown.max() == 255


def test_small_ones_are_enlarged_by_whole_pixels() -> None:
    shown = picture(np.eye(8))
    assert shown is not None and shown.shape == (64, 64, 3)
    assert (shown[:8, :8] == 255).all() and (shown[:8, 8:16] == 0).all()


def test_one_grey_is_black_and_nan_is_no_trouble() -> None:
    flat = picture(np.full((64, 64), 7.0))
    assert flat is not None and not flat.any()
    holes = np.ones((64, 64))
    holes[0, 0] = np.nan
    assert picture(holes) is not None


NO_PICTURES = [np.zeros(64), np.zeros((7, 8, 9)), np.zeros((0, 8)), "text", 3, np.zeros((2, 2), "U1")]


@pytest.mark.parametrize("sample", NO_PICTURES)
def test_what_is_no_picture_is_none(sample: object) -> None:
    assert picture(sample) is None
