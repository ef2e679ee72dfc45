"""Compressed gradients without processes: what is sent now and what later adds up to what was given, in every case."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_dp.errors import DivergenceError
from paddle_dp.exchange.compressed import LowRankGradients, check_factors, is_worthwhile, orthonormal
from paddle_dp.exchange.pushed_gradients import PushReduce
from paddle_dp.exchange.residuals import (
    Residuals,
    factors_of,
    residuals_of,
    restore_factors,
    restore_residuals,
)
from paddle_dp.tensors import narrowed, numbers_of
from tests.exchange.test_pushed_gradients import finished, give, wires_of_two

VALUES = [[1.0 + 2**-12, -3e-5, 700.3], [1 / 3, 2e-9, -0.1]]


def compressing(dtype):
    """Two ranks that exchange one parameter in 16 bits: (parameter, sum, errors) of each."""
    made = []
    for wire in wires_of_two():
        parameter = paddle.create_parameter([3], "float32")
        errors = Residuals([parameter])
        made.append(
            (parameter, PushReduce(wire, [parameter], [[0, 1]], reduce_dtype=dtype, residuals=errors), errors)
        )
    return made


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_was_sent_and_what_is_owed_is_what_was_given(dtype):
    ranks, applied = compressing(dtype), np.zeros(3)
    for _ in range(50):
        for values, (parameter, _, errors) in zip(VALUES, ranks, strict=True):
            errors.begin(1.0)
            give(parameter, values)
        sums = finished(*(rank[:2] for rank in ranks))
        assert sums[0] == sums[1]  # bit by bit: the owner, too, has the rounded sum
        applied += sums[0]
        for _, _, errors in ranks:
            errors.keep()
    given = 50 * np.sum(np.array(VALUES, "float32").astype("float64"), 0)
    debt = sum(errors.saved(0).numpy().astype("float64") for _, _, errors in ranks)
    np.testing.assert_allclose(applied + debt, given, rtol=1e-6)
    ulp = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    # Not 50 times one update's error.
    np.testing.assert_allclose(applied, given, rtol=2 * ulp / 50, atol=2e-7)


def test_an_update_that_is_left_out_changes_no_error():
    (_, _, errors), _ = compressing("bfloat16")
    errors.lose(0, paddle.to_tensor([1.0, 2.0, 3.0]))
    errors.keep()
    errors.lose(0, paddle.to_tensor([9.0, 9.0, 9.0]))
    assert errors.get(0).tolist() == [9.0] * 3  # a second part of the same gradient
    errors.begin(1.0)
    assert errors.get(0).tolist() == errors.saved(0).tolist() == [1.0, 2.0, 3.0]


def test_errors_follow_the_loss_scale_and_are_saved_without_it():
    (parameter, _, errors), _ = compressing("bfloat16")
    errors.begin(1024.0)
    errors.lose(0, paddle.to_tensor([1.0, 2.0, 4.0]))
    errors.keep()
    errors.begin(512.0)
    assert errors.get(0).tolist() == [0.5, 1.0, 2.0]
    assert errors.saved(0).tolist() == [2.0**-10, 2.0**-9, 2.0**-8]
    other = Residuals([parameter])
    other.begin(256.0)
    other.restore(0, errors.saved(0))
    assert other.get(0).tolist() == [0.25, 0.5, 1.0]


def test_float16_sends_its_largest_number_and_hides_no_infinity():
    sent, clipped = narrowed(np.array([1e6, -1e6, np.inf, np.nan, 1.0], np.float32), "float16")
    assert clipped and not narrowed(np.array([np.inf, np.nan, 65504.0], np.float32), "float16")[1]
    assert not narrowed(np.array([1e6], np.float32), "bfloat16")[1]
    assert numbers_of(sent, "float16").tolist()[:3] == [65504.0, -65504.0, np.inf]
    assert np.isnan(numbers_of(sent, "float16")[3])


def test_what_float16_cannot_hold_is_known_by_its_place_until_it_was_told():
    ranks = compressing("float16")
    for values in ([1e6, 1.0, 1.0], [4e4, 4e4, 1.0], [1.0, 1.0, 1.0]):
        for parameter, _, errors in ranks:
            errors.begin(1.0)
            parameter.clear_gradient(False)
            give(parameter, values)
        # In the second update, of which no error is kept, only the sum is large.
        finished(*(rank[:2] for rank in ranks))
        found = [errors.take_clipped() for _, _, errors in ranks]
        assert found == {1e6: [[0], [0]], 4e4: [[0], []], 1.0: [[], []]}[values[0]]
        assert ranks[0][2].take_clipped() == []


def test_what_a_device_could_not_hold_is_read_when_it_is_asked_for():
    errors = compressing("float16")[0][2]
    for flag in (False, True, False):
        errors.may_be_clipped([0, 2], paddle.to_tensor(flag))
    errors.may_be_clipped([1], paddle.to_tensor(False))
    assert errors.take_clipped() == [0, 2] and errors.take_clipped() == []


class Ranks:
    """Two ranks of a mesh, of which the other computed what `other` makes of this rank's digests."""

    host = "here"

    def __init__(self, other):
        self._other = other

    def gather(self, mine):
        return [mine, self._other(mine) if isinstance(mine, list) else "there"]


def test_factors_of_other_bits_are_met_at_the_door():
    shapes = [(40, 30), (64, 576)]
    check_factors(shapes, 2, Ranks(list))
    with pytest.raises(
        DivergenceError, match=r"rank 1 \(there\) computed other bits than rank 0 \(here\).*=bfloat16"
    ):
        check_factors(shapes, 2, Ranks(lambda mine: [*mine[:-1], [0, 0]]))


class Alone:
    """The sum over one rank."""

    each_micro_batch = False

    def __init__(self, tensors, channel):
        self.tensors = tensors

    def finish(self):
        return [place for place, tensor in enumerate(self.tensors) if tensor.grad is None]


def low_rank(rank=2):
    """A matrix that is worth factors, one that is not, a bias; their errors; the exchange of one rank."""
    parameters = [paddle.create_parameter(shape, "float32") for shape in ([40, 5, 6], [4, 4], [7])]
    errors = Residuals(parameters)
    named = list(zip("abc", parameters, strict=True))
    return parameters, errors, LowRankGradients(named, rank, Alone, errors)


def drawn(shape, seed=0):
    return paddle.to_tensor(np.random.default_rng(seed).standard_normal(shape), "float32")


def updated(parameters, errors, exchange, gradients):
    """The gradients of one update, after the exchange; None: there is none."""
    errors.begin(1.0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.clear_gradient(False)
        if gradient is not None:
            parameter._copy_gradient_from(gradient.clone())
    lacking = exchange.finish()
    assert lacking == [place for place, gradient in enumerate(gradients) if gradient is None]
    errors.keep()
    exchange.keep()
    return [None if p.grad is None else p.grad.numpy() for p in parameters]


def test_a_matrix_is_sent_as_factors_only_where_that_halves_it():
    assert is_worthwhile([512, 512, 3, 3], 4) and is_worthwhile([40, 5, 6], 2)
    assert not is_worthwhile([4, 4], 2) and not is_worthwhile([1000], 1) and not is_worthwhile([], 1)


def test_what_two_factors_leave_out_comes_later():
    parameters, errors, exchange = low_rank()
    given, small, bias = drawn([40, 5, 6]), drawn([4, 4]), drawn([7])
    applied = np.zeros([40, 5, 6])
    for _ in range(60):
        found = updated(parameters, errors, exchange, [given, small, bias])
        applied += found[0]
        assert np.linalg.matrix_rank(found[0].reshape(40, 30)) == 2
        assert (found[1] == small.numpy()).all() and (found[2] == bias.numpy()).all()
    np.testing.assert_allclose(applied + errors.saved(0).numpy(), 60 * given.numpy(), atol=1e-3)
    apart = np.linalg.norm(applied / 60 - given.numpy()) / np.linalg.norm(given.numpy())
    assert apart < 0.25  # without memory it would stay at what two of 30 directions leave: 0.9


@pytest.mark.parametrize(("rank", "factors"), [(2, [1, 1]), (1, [1, 0, 0, 1, 1, 1])])
def test_a_gradient_of_that_rank_is_found_in_two_updates_also_after_zeros(rank, factors):
    parameters, errors, exchange = low_rank()
    given = paddle.matmul(drawn([40, rank]), drawn([rank, 30], 1)).reshape([40, 5, 6])
    for factor in factors:
        found = updated(parameters, errors, exchange, [given * factor, None, None])
    np.testing.assert_allclose(found[0], given.numpy(), atol=1e-4)


def test_an_absent_gradient_stays_absent_and_its_error_is_kept():
    parameters, errors, exchange = low_rank()
    updated(parameters, errors, exchange, [drawn([40, 5, 6]), None, None])
    before = errors.saved(0).numpy()
    assert updated(parameters, errors, exchange, [None, None, None]) == [None, None, None]
    assert (errors.saved(0).numpy() == before).all() and before.any()


def test_an_update_that_is_left_out_keeps_the_factors_too():
    parameters, _, exchange = low_rank()
    before = exchange.right[0].numpy()
    parameters[0]._copy_gradient_from(drawn([40, 5, 6]))
    exchange.finish()
    assert (exchange.right[0].numpy() == before).all()
    exchange.keep()
    assert (exchange.right[0].numpy() != before).any()


def test_columns_become_orthonormal_and_those_that_others_explain_zeros():
    columns = drawn([50, 4])
    columns[:, 2] = 3 * columns[:, 0] - columns[:, 1]
    made = orthonormal(columns).numpy()
    np.testing.assert_allclose(made.T @ made, np.diag([1, 1, 0, 1]), atol=1e-6)


class Saved:
    """What some ranks saved beside, as one rank reads it; `rank` None: there were not as many ranks."""

    def __init__(self, of_ranks, rank=None, shared=None):
        self._of_ranks, self.shared = of_ranks, shared or {}
        self.local = {} if rank is None else of_ranks[rank]

    def local_into(self, name, tensor):
        tensor.set_value(self.local[name])

    def shared_into(self, name, tensor):
        tensor.set_value(self.shared[name])

    def sum_into(self, name, tensor):
        tensor.set_value(sum(own[name] for own in self._of_ranks))
        return True


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_on_another_number_of_ranks_as_much_is_owed(ranks):
    parameters = [paddle.create_parameter([2, 3], "float32"), paddle.create_parameter([4], "float32")]
    names, before = ["a", "b"], []
    for seed in range(2):
        memory = Residuals(parameters)
        memory.restore(0, drawn([2, 3], seed))
        memory.restore(1, drawn([4], seed + 7))
        before.append(memory)
    of_ranks = [residuals_of(memory, names) for memory in before]
    after = [Residuals(parameters) for _ in range(ranks)]
    for rank, memory in enumerate(after):
        restore_residuals(memory, names, ranks, Saved(of_ranks, rank if ranks == 2 else None))
    for place in (0, 1):
        debts = [sum(memory.saved(place).numpy() for memory in side) for side in (before, after)]
        np.testing.assert_allclose(*debts, rtol=1e-6)
        if ranks == 2:
            assert all((a.saved(place) == b.saved(place)).all() for a, b in zip(before, after, strict=True))


def test_factors_of_as_many_columns_are_taken_over():
    _, _, exchange = low_rank()
    saved = Saved([], shared=factors_of({0: exchange.right[0] * 2}, "abc"))
    same, other = low_rank()[2], low_rank(3)[2]
    before = other.right[0].numpy()
    for one in (same, other):
        restore_factors(one.right, "abc", saved)
    assert (same.right[0] == exchange.right[0] * 2).all() and (other.right[0].numpy() == before).all()


def test_errors_lie_in_two_pieces_of_memory_by_turns():
    (_, _, errors), _ = compressing("bfloat16")
    seen = []
    for value in range(4):
        errors.begin(1.0)
        room = errors.room(0)
        assert errors.get(0) is None or room.data_ptr() != errors.get(0).data_ptr()
        room.set_value(paddle.full([3], float(value)))
        errors.lose(0, room)
        if value != 2:  # that update is left out
            errors.keep()
        seen.append(room.data_ptr())
    assert len(set(seen)) == 2
    assert errors.saved(0).tolist() == [3.0] * 3
