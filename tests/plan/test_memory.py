"""What a rank holds, as ZeRO's paper has it, and as whole parameters are dealt."""

import pytest

from paddle_dp.plan.memory import StateBytes, Widths, formula, owners, state_bytes


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_1_of_the_paper(stage: int, gigabytes: float) -> None:
    """7.5 billion parameters, 64 ranks, mixed precision with Adam."""
    found = formula(7_500_000_000, 64, stage, Widths.for_states(2, low=True))
    assert found.total / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_widths_are_those_of_the_optimizer() -> None:
    assert Widths.for_states(2) == Widths(parameter=4, gradient=4, optimizer=8)
    assert Widths.for_states(1).optimizer == 4
    assert Widths.for_states(0).optimizer == 0
    assert Widths.for_states(2, double=True) == Widths(parameter=8, gradient=8, optimizer=16)
    assert Widths.for_states(1, low=True) == Widths(parameter=2, gradient=2, optimizer=8)


def test_the_largest_is_dealt_first_to_whom_has_least() -> None:
    assert owners([1, 5, 2, 2], 2) == [1, 0, 1, 1]
    assert owners([3, 3, 3], 3) == [0, 1, 2]


def test_neighbours_of_one_size_have_several_owners() -> None:
    block = [3, 1, 4, 4]  # qkv, out, up, down
    dealt = owners(block * 4, 2)
    for at in range(0, len(dealt), 4):
        first, second = (
            sum(n for n, o in zip(block, dealt[at : at + 4], strict=True) if o == r) for r in (0, 1)
        )
        assert abs(first - second) == 2  # of 12: one alone could have 8


def test_seats_differ_by_one_parameter_at_most() -> None:
    sizes = [128 * 512, 512, 128, 128 * 128, 256 * 128, 128, 640] * 4
    each = [one.optimizer / 8 for one in state_bytes(sizes, 4, 3)]
    assert sum(each) == sum(sizes)
    assert max(each) - min(each) <= max(sizes)


def test_a_stage_shares_what_it_says() -> None:
    sizes = [6, 4, 2]
    assert state_bytes(sizes, 2, 1) == [StateBytes(parameters=48, gradients=48, optimizer=48)] * 2
    assert state_bytes(sizes, 2, 2)[0] == StateBytes(parameters=48, gradients=24, optimizer=48)
    assert state_bytes(sizes, 2, 3)[0] == StateBytes(parameters=24, gradients=24, optimizer=48)
    assert state_bytes(sizes, 1, 3) == [formula(12, 1, 0)]
