"""The gradients of a rank's share of a global batch, for ranks that do not wait for one another."""

from __future__ import annotations

from paddle_dp.batch import Batch
from paddle_dp.core import gradients
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.learner.learner import Learner
from paddle_dp.learner.runner import totals
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.strategies._rounds.periodic_means import LocalCounter


def gradients_of_share(
    learner: Learner, batch: Batch, collect: bool
) -> tuple[float, dict[str, float] | None]:
    """Computes the gradients of the mean over this rank's share of a batch, for an `AsyncRank`. Returns the number
    that the loss counts in it, without which there are none, and with `collect` the metrics of `train_share`."""
    heartbeat.enter("forward")
    counter = LocalCounter(learner.loss, learner.mesh)
    batch = learner.mixed.cast_batch(batch)
    local_sums, divisor, count = learner.compute_gradients(batch, counter, GradientExchange(), collect)
    heartbeat.enter("update")
    if not counter.count:
        return 0.0, None
    if divisor != count:
        gradients.scale(learner.trainable, divisor / count)
    if not collect:
        return count, None
    sums, (norm,) = totals(local_sums, gradients.global_norm(learner.trainable))
    return count, {**sums, "gradient_norm": norm, "count": count}
