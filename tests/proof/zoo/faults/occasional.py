"""Faults that act now and then only: late, in some batches, near a bound, or in updates that nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.proof.zoo.case import Fault, Setting, strategy
from tests.proof.zoo.patching import AXES, CLIP, LEARNER, OWNERS, all_of, ranks, replaced


def smaller_gradients_when(sick: Callable[[Any, Any, bool], bool]) -> AbstractContextManager[None]:
    """Where `sick(learner, batch, collect_metrics)` says so, several ranks learn from 0.9 of their gradients."""

    def make(train: Callable[..., Any]) -> Callable[..., Any]:
        def trained(self: Any, batch: Any, collect_metrics: bool = False, *accept: Any) -> Any:
            self.done = getattr(self, "done", 0) + 1
            self.sick = ranks() > 1 and sick(self, batch, collect_metrics)
            return train(self, batch, collect_metrics, *accept)

        return trained

    def make_unscale(unscale: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, factor: unscale(self, factor * (0.9 if self.sick else 1.0))

    return all_of(replaced(f"{LEARNER}.train_batch", make), replaced(f"{LEARNER}._unscale", make_unscale))


def unread_updates() -> AbstractContextManager[None]:
    return smaller_gradients_when(lambda learner, batch, collect_metrics: not collect_metrics)


def from_step_9() -> AbstractContextManager[None]:
    return smaller_gradients_when(lambda learner, batch, collect_metrics: learner.rate.steps >= 8)


def from_step_50() -> AbstractContextManager[None]:
    return smaller_gradients_when(lambda learner, batch, collect_metrics: learner.rate.steps >= 49)


def every_tenth_batch() -> AbstractContextManager[None]:
    return smaller_gradients_when(lambda learner, batch, collect_metrics: batch.index % 10 == 9)


def from_the_third_epoch() -> AbstractContextManager[None]:
    return smaller_gradients_when(lambda learner, batch, collect_metrics: batch.epoch >= 2)


def clips_below_the_bound() -> AbstractContextManager[None]:
    """The clip acts from 0.98 of its bound on."""

    def make(clip: Callable[..., Any]) -> Callable[..., Any]:
        def early(self: Any) -> None:
            from dataclasses import replace

            clips, norm = self.clips, float(self.measure())
            if any(0.98 * clip.bound < norm < clip.bound for clip in clips):
                self.clips = tuple(replace(clip, bound=0.98 * clip.bound) for clip in clips)
            clip(self)
            self.clips = clips

        return early

    return replaced(CLIP, make)


def clips_far_above_the_bound() -> AbstractContextManager[None]:
    """The clip does not act where the norm is no more than a hundredth above the bound."""

    def make(clip: Callable[..., Any]) -> Callable[..., Any]:
        def late(self: Any) -> None:
            clips, norm = self.clips, float(self.measure())
            self.clips = tuple(clip for clip in clips if not clip.bound < norm < 1.01 * clip.bound)
            clip(self)
            self.clips = clips

        return late

    return replaced(CLIP, make)


def accuracy_twice() -> AbstractContextManager[None]:
    def make(metrics: Callable[..., Any]) -> Callable[..., Any]:
        def twice(self: Any, *given: Any) -> Any:
            numbers = metrics(self, *given)
            return {
                name: value * (2 if name == "acc1" and ranks() > 1 else 1) for name, value in numbers.items()
            }

        return twice

    return replaced(f"{LEARNER}._metrics", make)


def forward_before_the_values() -> AbstractContextManager[None]:
    """Where new values may travel behind the next forward, that forward does not wait for them."""
    from paddle_dp.axes.sharding.zero import Zero

    share_now = Zero.share

    def make_publish(publish: Callable[..., Any]) -> Callable[..., Any]:
        def published(self: Any) -> None:
            self.zero.postpones = self.overlaps
            publish(self)

        return published

    def make_share(share: Callable[..., Any]) -> Callable[..., Any]:
        def postponed(self: Any) -> None:
            self.is_pending = getattr(self, "postpones", False)
            if not self.is_pending:
                share(self)

        return postponed

    def make_settle(settle: Callable[..., Any]) -> Callable[..., Any]:
        def settled(self: Any) -> None:
            if getattr(self, "is_pending", False):
                self.is_pending = False
                share_now(self)
            settle(self)

        return settled

    zero = "paddle_dp.axes.sharding.zero:Zero"
    return all_of(
        replaced(f"{OWNERS}.publish", make_publish),
        replaced(f"{zero}.share", make_share),
        replaced(f"{zero}.settle", make_settle),
        replaced(
            f"{AXES}.finish",
            lambda exchange: lambda self: (exchange(self), self.zero.settle()),
        ),
    )


MLP, GPT, SOURCE = Setting("mlp"), strategy("gpt", data=2, check_every="null"), "our own"


def _fault(name: str, says: str, patch: Any, **more: Any) -> Fault:
    return Fault(name=name, says=says, source=SOURCE, patch=patch, **{"setting": MLP, **more})


FAULTS = (
    _fault(
        "unread updates",
        "Gradients are a tenth too small in updates whose metrics nobody reads.",
        unread_updates,
    ),
    _fault(
        "from step 9 on", "Gradients are a tenth too small from the ninth update on.", from_step_9, steps=12
    ),
    _fault(
        "from step 50 on", "Gradients are a tenth too small from the 50th update on.", from_step_50, steps=64
    ),
    _fault(
        "every tenth batch",
        "Gradients of every tenth batch are a tenth too small.",
        every_tenth_batch,
        steps=12,
    ),
    _fault(
        "from the third epoch on",
        "Gradients are a tenth too small from the third epoch on.",
        from_the_third_epoch,
        guard="rehearsal",
        exam="rehearsal",
    ),
    _fault(
        "clip below its bound",
        "A clip acts where the norm of the gradients is a fiftieth or less below its bound.",
        clips_below_the_bound,
        setting=GPT,
    ),
    _fault(
        "clip above its bound",
        "A clip does not act where the norm of the gradients is a hundredth or less above its bound.",
        clips_far_above_the_bound,
        setting=GPT,
    ),
    _fault("accuracy twice", "On several ranks acc1 is twice what it is.", accuracy_twice),
    _fault(
        "forward before the values",
        "A forward that may begin while new weights travel does not wait for them.",
        forward_before_the_values,
        setting=strategy("gpt", sharding=2, check_every="null"),
    ),
)
