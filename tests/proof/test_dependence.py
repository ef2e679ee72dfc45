"""Whether one process's training depends on the order of samples, or on what no seed decides."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.proof.dependence import FAR, find_dependence, kinks


def curve(*losses, buffer=None):
    made = [{"loss": np.asarray(loss), "gradient norm": np.asarray(1.0)} for loss in losses]
    if buffer is not None:
        made[-1]["buffer queue"] = np.asarray(buffer)
    return made


PLAIN = curve(2.0, 1.5, 1.2, 1.0, buffer=[1.0, 2.0])


def find(dtype="float64", permuted=PLAIN, nudged=PLAIN, again=PLAIN):
    """What is found, and the runs that were asked for."""
    asked, curves = [], {"permuted 1": permuted, "weights 1": nudged, "again": again}

    def run(noise):
        asked.append("again" if noise is None else noise.name)
        return curves[asked[-1]]

    return find_dependence(run, PLAIN, dtype), asked


def test_a_model_that_only_rounds_is_trained_once_more_and_depends_on_nothing():
    found, asked = find(permuted=curve(2.0 + 1e-12, 1.5, 1.2, 1.0 - 1e-9, buffer=[1.0, 2.0]))
    assert found is None and asked == ["permuted 1"]


@pytest.mark.parametrize("step", [1, 3, 4])
def test_another_order_that_moves_a_later_step_is_a_dependence(step):
    losses = [2.0, 1.5, 1.2, 1.0]
    losses[step - 1] += 1e-5
    found, asked = find(permuted=curve(*losses, buffer=[1.0, 2.0]))
    assert (found.kind, found.step, found.name, found.plain) == (
        "order",
        step,
        "loss",
        [2.0, 1.5, 1.2, 1.0][step - 1],
    )
    assert asked == ["permuted 1", "again", "weights 1"]


def test_a_buffer_that_another_order_fills_otherwise_is_a_dependence():
    found, _ = find(permuted=curve(2.0, 1.5, 1.2, 1.0, buffer=[1.0, 2.1]))
    assert (found.kind, found.name, found.plain) == ("order", "buffer queue", None)
    assert found.distance == pytest.approx(0.1 / 5**0.5)


def test_a_repetition_that_departs_is_chance():
    again = curve(2.0, 1.5, 1.3, 1.0, buffer=[1.0, 2.0])
    found, asked = find(permuted=again, again=again)
    assert (found.kind, found.step) == ("chance", 3) and asked == ["permuted 1", "again"]


@pytest.mark.parametrize(("nudged", "depends"), [(1e-2 / FAR * 1.1, False), (1e-2 / FAR * 0.9, True)])
def test_a_training_that_amplifies_rounding_is_no_dependence(nudged, depends):
    """From nudged weights it departs as well, in this step or before."""
    permuted = curve(2.0, 1.5, 1.2, 1.01, buffer=[1.0, 2.0])
    found, _ = find(permuted=permuted, nudged=curve(2.0, 1.5, 1.2 + nudged, 1.0, buffer=[1.0, 2.0]))
    assert (found is not None) is depends


def test_what_is_not_finite_is_judged_elsewhere_and_low_precision_is_too_coarse():
    broken = curve(2.0, np.nan, np.nan, np.inf, buffer=[1.0, 2.0])
    assert find(permuted=broken)[0] is None
    assert find("bfloat16", permuted=curve(9.0, 1.5, 1.2, 1.0))[1] == []


@pytest.mark.parametrize(
    ("forward", "jumps"),
    [
        (nn.functional.gelu, False),
        (nn.functional.softmax, False),
        (nn.functional.layer_norm, False),
        (nn.functional.relu, True),
        (nn.functional.prelu, True),
        (lambda x: x.max(-1), True),
        (lambda x: x.argmax(-1), True),
        (lambda x: paddle.where(x > 0, x, 2 * x), True),
        (lambda x: nn.functional.max_pool2d(x.reshape([1, 1, 2, 2]), 2), True),
    ],
)
def test_operators_that_jump_or_bend_are_counted(forward, jumps):
    class Fake:
        @staticmethod
        def forward(x):
            if forward is nn.functional.layer_norm:
                return forward(x, [4])
            return forward(x, paddle.full([1], 0.2)) if forward is nn.functional.prelu else forward(x)

    learner, x = (
        SimpleNamespace(model=nn.Identity(), runner=Fake()),
        paddle.to_tensor([[0.1, -0.2, 0.3, -0.4]]),
    )
    with kinks(learner) as seen:
        learner.runner.forward(x)
    assert bool(seen) is jumps, seen
