"""ZeRO-3 on the device: an order that all ranks follow, ranks that leave it, and parameters that travel ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exchange import test_missing_gradients
from tests.house.training import build_trainer, settle
from tests.learner import test_frozen
from tests.ranks import run_ranks
from tests.sim.recipes import GPT

ALL = [0, 1, 2, 0, 1, 2, 0, 1]  # on each of two ranks every expert
BATCHES = [
    ALL,
    ALL,
    ALL,
    [0, 1, 2, 0, 1, 1, 0, 1],
    ALL,
    ALL,
    ALL,
    ALL,
    [1, 1, 2, 0, 0, 0, 0, 1],
    ALL,
    ALL,
    [1, 1, 2],
]


def learn(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """In a rank: what the cases learn, how many passes followed an order, and how often this rank left one."""
    from paddle_dp.axes.sharding.broadcasts import Broadcasts

    counts = {"followed": 0, "left": 0, "midway": 0}
    begin, leave = Broadcasts.begin, Broadcasts.abandon

    def begun(self: Any, *given: Any) -> bool:
        follows = begin(self, *given)
        counts["followed"] += follows
        return follows

    def left(self: Any, order: Any, asked: int, gradients: int, midway: bool) -> None:
        counts["midway" if midway else "left"] += 1
        leave(self, order, asked, gradients, midway)

    Broadcasts.begin, Broadcasts.abandon = begun, left  # type: ignore[method-assign]
    test_missing_gradients.ROUTES[:] = BATCHES
    try:
        return {"learned": test_missing_gradients.learn_each(cases), "counts": counts}
    finally:
        Broadcasts.begin, Broadcasts.abandon = begin, leave  # type: ignore[method-assign]


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "axes"),
    [(2, {}), (2, {"sync_batch_norm": True}), (2, {"prefetch": 0}), (4, {"pipeline": 2})],
)
def test_a_rank_that_leaves_the_order_learns_what_one_process_learns(
    ranks: int, axes: dict[str, Any]
) -> None:
    norm = "sync_batch_norm" in axes
    layout = test_missing_gradients.hybrid(sharding=2, sharding_stage=3, **axes)
    cases = [{"strategy": layout, "micro_batches": n, "norm": norm} for n in (1, 2)]
    truth = run_ranks(learn, 1, [{**case, "strategy": {"use": "single"}} for case in cases])[0]["learned"]
    ranks_found = run_ranks(learn, ranks, cases, timeout=300)
    counts = [found["counts"] for found in ranks_found]
    if axes.get("prefetch", 1):
        assert all(of_rank["followed"] for of_rank in counts)
        assert any(of_rank["midway"] for of_rank in counts)
    else:
        assert not any(of_rank["followed"] for of_rank in counts)
    for found in ranks_found:
        for ours, one in zip(found["learned"], truth, strict=True):
            np.testing.assert_allclose(ours["rows"], one["rows"], rtol=1e-9)
            assert ours["held_out"] == pytest.approx(one["held_out"], rel=1e-9)
            for name, weight in ours["weights"].items():
                np.testing.assert_allclose(weight, one["weights"][name], atol=1e-9, err_msg=name)


def gradients(folder: str, prefetch: int, more: str = "") -> tuple[list[dict[int, str]], int]:
    """In a rank: of four steps of two micro-batches, the bits of the gradients that this rank owns; and its rounds."""
    from paddle_dp.axes.sharding.broadcasts import Broadcasts
    from paddle_dp.axes.sharding.rounds import Rounds

    seen, rounds = [], []
    finish, one_round = Broadcasts.finish, Rounds._round

    def finished(self: Any) -> None:
        finish(self)
        own = {place: self._parameters[place].grad for place, mine in enumerate(self._is_local) if mine}
        seen.append({place: g.numpy().tobytes().hex() for place, g in own.items() if g is not None})

    def counted(self: Any, *given: Any, **more: Any) -> bool | None:
        rounds.append(given)
        return one_round(self, *given, **more)

    Broadcasts.finish, Rounds._round = finished, counted  # type: ignore[method-assign]
    try:
        layout = f"{{use: hybrid, sharding: 2, sharding_stage: 3, prefetch: {prefetch}{more}}}"
        trainer = build_trainer(GPT, folder, f"strategy={layout}")
        for batch in trainer.loader.read(0):
            trainer.learner.train_batch(batch, True)
        settle(trainer)
    finally:
        Broadcasts.finish, Rounds._round = finish, one_round  # type: ignore[method-assign]
    return seen, len(rounds)


@pytest.mark.long
@pytest.mark.parametrize("more", ["", ", reduce_dtype: bfloat16"])
def test_sent_ahead_or_in_rounds_gradients_have_the_same_bits(more: str, tmp_path: Path) -> None:
    """A run that goes on from a checkpoint begins in rounds where the other one followed an order."""
    in_rounds, ahead = (run_ranks(gradients, 2, str(tmp_path), prefetch, more) for prefetch in (0, 1))
    assert any(in_rounds[0][0])
    for one, other in zip(in_rounds, ahead, strict=True):
        assert one[0] == other[0]
    assert in_rounds[0][1] == in_rounds[1][1]  # no rank begins a round alone
    assert ahead[0][1] == ahead[1][1] < in_rounds[0][1] / 2


@pytest.mark.long
def test_frozen_weights_travel_for_their_layers_and_no_gradient_does() -> None:
    one, _ = run_ranks(test_frozen.learn, 1, {"use": "single"})[0]
    stages = [{"use": "hybrid", "sharding": 2, "sharding_stage": 3, "prefetch": ahead} for ahead in (0, 1)]
    for found in zip(*run_ranks(test_frozen.learn_each, 2, stages), strict=True):
        test_frozen.assert_one_process([weights for weights, _ in found], one)
        assert [sum("2.weight" in weights for weights, _ in found)] == [1]
