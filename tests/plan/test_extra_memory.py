"""What a rank keeps beside weights, gradients and states: by hand."""

from dataclasses import replace

import pytest

from paddle_dp.part import read_part
from paddle_dp.plan.layout import Weight
from paddle_dp.plan.memory import Widths, flat_gradient_bytes, inbound_bytes

# A matrix of which factors of 2 columns are worth it, one that is too small for it, and a bias.
WEIGHTS = [
    Weight(name=str(size), size=size, shape=shape)
    for size, shape in ((6000, (60, 100)), (20, (4, 5)), (100, (100,)))
]
ALL, LARGE = 6120, 6000


@pytest.mark.parametrize(
    ("compress", "width", "accelerator", "bytes_"),
    [
        ("none", 4, True, 0),
        ("bfloat16", 4, False, 2 * 4 * ALL),
        ("float16", 4, True, (2 * 4 + 2 * 2) * ALL),
        ("float16", 2, False, 2 * 4 * ALL),  # errors of weights in 16 bits have 32
        ("bfloat16", 8, False, 2 * 8 * ALL),
        ("power_sgd rank 2", 4, False, 3 * 4 * LARGE),
        ("power_sgd rank 2", 4, True, 3 * 4 * LARGE),
    ],
)
def test_errors_are_kept_and_made_anew(compress, width, accelerator, bytes_):
    config = read_part("strategies", {"use": "data_parallel", "compress": compress}).config
    layout = replace(config.layout(2), widths=Widths(parameter=width), accelerator=accelerator)
    assert layout.exchange_state(WEIGHTS) == bytes_


@pytest.mark.parametrize(
    ("way", "beside"), [("", 0), ("pushed", 0), ("per_parameter", 0), ("after", 600), ("bucketed", 700)]
)
def test_flat_gradients_are_beside_their_own(way, beside):
    assert flat_gradient_bytes(way, 600.0, 100.0) == beside
    assert flat_gradient_bytes("bucketed", 60.0, 100.0) == 2 * 60


@pytest.mark.parametrize(
    ("workers", "in_step", "parts"), [(1, True, 1), (2, True, 1), (4, True, 3), (1, False, 3), (4, False, 6)]
)
def test_a_server_has_what_came_until_it_is_added_up(workers, in_step, parts):
    assert inbound_bytes(600, 4, workers, in_step) == 4 * 600 * parts
