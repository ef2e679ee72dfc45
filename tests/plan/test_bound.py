"""The shortest step: what must wait for what, in numbers that one can follow on paper."""

import pytest

from paddle_dp.plan.bound import Compute, WorkOrder, bound
from paddle_dp.plan.layout import Sent

COMPUTE = Compute(forward=2.0, backward=4.0)  # seconds; the link carries 1 byte a second


def one(size, when, hides=True, **more):
    return Sent(axis="data", payload="gradients", bytes=size, when=when, hides=hides, **more)


def test_nothing_of_a_gradient_can_be_sent_before_backward():
    for size, shortest in ((1, 6), (4, 6), (10, 12)):
        assert bound(COMPUTE, [one(size, "last backward")], 1.0) == max(6, 2 + size) == shortest
    assert bound(COMPUTE, [one(10, "last backward")], 1.0, overlap=False) == 16


def test_an_update_follows_each_gradients_own_exchange():
    late = Compute(forward=2.0, backward=4.0, update=3.0)
    assert bound(late, [one(6, "last backward")], 1.0) == 9
    for when in ("last backward", "every backward"):
        assert bound(late, [one(8, when)], 1.0) == 10


def test_gradients_wait_for_the_last_micro_batch():
    order = WorkOrder(micro_batches=4)
    assert bound(COMPUTE, [one(5, "last backward")], 1.0, order) == 5 + 5  # the last backward alone takes 1


def test_new_parameters_travel_in_the_next_forward_alone():
    shared = [one(3, "first forward"), one(4, "last backward")]
    assert bound(COMPUTE, shared, 1.0) == 3 + 4
    assert bound(COMPUTE, shared, 1.0, WorkOrder(micro_batches=2)) == 3 + 2 + 1 + 4


def test_the_busier_direction_decides():
    assert bound(COMPUTE, [one(3, "last backward", received=9.0)], 1.0) == 2 + 9
    both = [one(3, "every backward", received=9.0), one(9, "every backward", received=3.0)]
    assert bound(COMPUTE, both, 1.0) == 2 + 12


def test_stage_3_gathers_behind_every_forward_and_backward():
    three = [one(6, "every forward"), one(6, "every backward"), one(6, "every backward")]
    assert bound(COMPUTE, three, 3.0) == 2 + 4
    assert bound(COMPUTE, three, 2.0) == 3 + 6
    assert bound(COMPUTE, three, 2.0, WorkOrder(micro_batches=2)) == 3 + 6


def test_what_is_inside_of_layers_is_waited_for_and_keeps_the_link():
    inside = [one(2, "every forward", hides=False), one(2, "every backward", hides=False)]
    assert bound(COMPUTE, inside, 1.0) == 10
    assert bound(COMPUTE, [*inside, one(5, "last backward")], 1.0) == 2 + 2 + 2 + 5


def test_a_pipeline_is_its_schedules_timeline_with_transfers_between():
    order = WorkOrder(micro_batches=4, stages=2)
    bubble = 6 * (4 + 1) / 4
    assert bound(COMPUTE, [], 1.0, order) == pytest.approx(bubble)
    sent = [one(0.4, "between stages", hides=False, transfers=1)]
    slower = bound(COMPUTE, sent, 1.0, order)
    # 0.1 s there and back, before the first and behind the last micro-batch, and at each that waits in between
    assert bubble + 0.2 <= slower <= bubble + 4 * 0.2
    assert bound(COMPUTE, [*sent, one(3, "last backward")], 1.0, order) == pytest.approx(slower + 2)


def test_a_step_of_compute_is_a_third_forward():
    assert Compute.from_seconds(6.0) == COMPUTE and COMPUTE.total == 6.0
