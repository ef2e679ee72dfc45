"""The order in which layers need parameters: learned from one pass, what of it travels, and what stays."""

from __future__ import annotations

from paddle_dp.axes.sharding.prefetch_trace import PrefetchTrace, TraceRecorder


def learned(layers: int, ahead: int) -> PrefetchTrace:
    """Of a chain of layers with one parameter each: forward, then backward."""
    diary = TraceRecorder()
    for layer in range(layers):
        diary.need((layer,))
        diary.release(layer)
    for layer in reversed(range(layers)):
        diary.need((layer,))
        diary.gradient(layer)
        diary.release(layer)
    return diary.order([[100]] * layers, ahead)


def test_what_forward_still_has_is_not_sent_again() -> None:
    order = learned(4, ahead=0)
    assert order.needs == ((0,), (1,), (2,), (3,), (3,), (2,), (1,), (0,))
    assert order.travels == ((0,), (1,), (2,), (3,), (), (2,), (1,), (0,))
    assert order.retained == {(3, 3)}
    assert order.gradients == (3, 2, 1, 0)


def test_with_one_layer_ahead_is_asked_for_two() -> None:
    order = learned(4, ahead=1)
    assert [order.until(number, 1) for number in range(8)] == [2, 3, 4, 5, 6, 7, 8, 8]
    assert [order.until(number, 0) for number in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_parameter_that_is_needed_again_at_once_stays_in_between() -> None:
    """As a weight that two neighbours share, or one that recompute's second forward leaves to backward."""
    diary = TraceRecorder()
    for need in ((0, 1), (1, 2), (3,), (1,)):
        diary.need(need)
        for place in need:
            diary.release(place)
    assert diary.order([[9]] * 4, prefetch=0).travels == ((0, 1), (2,), (3,), (1,))
    assert diary.order([[9]] * 4, prefetch=1).travels == ((0, 1), (2,), (3,), ())


def test_what_is_used_until_the_end_is_not_released() -> None:
    diary = TraceRecorder()
    diary.need((0,))
    diary.need((1,))
    diary.release(1)
    diary.release(5)  # of a pass before
    assert diary.order([[1], [1]], 1).retained == frozenset()


def test_equal_passes_have_equal_digests() -> None:
    assert learned(3, 1).digest() == learned(3, 1).digest()
    assert learned(3, 1).digest() != learned(4, 1).digest()
