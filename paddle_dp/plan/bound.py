"""The shortest step that a layout's dependencies allow, from seconds of compute, bytes, and a link's speed.

A gradient cannot be sent before its backward. The next forward needs ZeRO's new parameters, in stage 3 layer by layer.
A rank waits for exchanges within cut layers. All bytes of a rank share its one link:

    forward    max(compute, hidden exchange) + blocking exchange
    backward   the same; the last one includes the update, which may follow each gradient's exchange

A pipeline's stages do so in their schedule's order, and each transfer between two stages takes its time. With the data
axis alone this is max(compute, forward + exchange).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paddle_dp.plan.layout import Sent, When
from paddle_dp.plan.pipeline_schedule import Kind, Schedule, Work, orders, timeline
from paddle_dp.units import LinkSpeed


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Seconds that a rank computes in one step: all its forwards, all its backwards, its update."""

    forward: float
    backward: float
    update: float = 0.0

    @classmethod
    def from_seconds(cls, seconds: float) -> Compute:
        """A step of `seconds`, of which backward takes two thirds: two matrix products for each one in forward."""
        return cls(forward=seconds / 3, backward=seconds * 2 / 3)

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The inputs of a step-time forecast: the link's speed, and a rank's compute time in a step."""

    link: LinkSpeed
    compute: Compute | None = None


@dataclass(frozen=True, kw_only=True)
class WorkOrder:
    """The order of a rank's work: micro-batches, and a pipeline's stages and schedule."""

    micro_batches: int = 1
    stages: int = 1
    virtual_stages: int = 1
    schedule: Schedule = "1f1b"


def bound(
    compute: Compute,
    exchange: Sequence[Sent],
    link: float,
    order: WorkOrder | None = None,
    overlap: bool = True,
) -> float:
    """Seconds of the shortest step over a link of `link` bytes a second in each direction.

    `exchange`: one rank's transfers. The job's bound is its slowest rank's, because ZeRO's owners have unequal parts.
    All stages of a pipeline count as equal, with this rank's numbers. `overlap` False: nothing is sent while the rank
    computes.
    """
    order = order or WorkOrder()
    spans_of_a_kind = order.micro_batches * order.virtual_stages

    def seconds_of(when: When, hides: bool) -> float:
        chosen = [s for s in exchange if s.when == when and (s.hides and overlap) == hides]
        return max(sum(s.bytes for s in chosen), sum(s.received_bytes for s in chosen)) / link

    def span_seconds(kind: Kind) -> tuple[float, float, float]:
        """Seconds of compute, hidden exchange and blocking exchange in one span."""
        every: When = "every forward" if kind == "forward" else "every backward"
        computed = compute.forward if kind == "forward" else compute.backward
        hidden, waited = seconds_of(every, True), seconds_of(every, False)
        return computed / spans_of_a_kind, hidden / spans_of_a_kind, waited / spans_of_a_kind

    def seconds(_: int, work: Work) -> float:
        work_seconds, hidden, waited = span_seconds(work.kind)
        if work.kind == "forward" and work.micro_batch == 0:
            hidden += seconds_of("first forward", True) / order.virtual_stages
            waited += seconds_of("first forward", False) / order.virtual_stages
        return max(work_seconds, hidden) + waited

    work = orders(order.schedule, order.stages, order.micro_batches, order.virtual_stages)
    crossing = sum(s.bytes / s.transfers for s in exchange if s.when == "between stages")
    spans = timeline(work, seconds, crossing / order.micro_batches / link)
    work_seconds, hidden, waited = span_seconds("backward")
    ends = []
    for stage in range(order.stages):
        stage_spans = [s for s in spans if s.stage == stage and s.work.kind == "backward"]
        begun = min(span.start for span in stage_spans if span.work.micro_batch == order.micro_batches - 1)
        computed = max(span.stop for span in stage_spans) - max(0.0, hidden - work_seconds) + compute.update
        ends.append(max(computed, begun + waited + hidden + seconds_of("last backward", True)))
    return max(ends) + seconds_of("last backward", False)
