"""Faults that act now and then only: late, in some batches, near a bound, or in updates that nobody reads."""

from __future__ import annotations

from dataclasses import replace

from tests.proof.zoo.case import Fault, FaultTable, Setting, strategy
from tests.proof.zoo.patching import AXES, CLIP, LEARNER, OWNERS, around, ranks

MLP, GPT, SOURCE = Setting("mlp"), strategy("gpt", data=2, check_every="null"), "our own"
ZERO = "paddle_dp.axes.sharding.zero:Zero"
FAULTS = FaultTable()


def smaller_gradients_when(is_sick):
    """Where `is_sick(learner, batch, collect_metrics)`, several ranks learn from 0.9 of their gradients."""

    def train_batch(train, learner, batch, collect_metrics=False, *approve):
        learner.sick = ranks() > 1 and is_sick(learner, batch, collect_metrics)
        return train(learner, batch, collect_metrics, *approve)

    def smaller(correct, learner, divisor, count):
        return correct(learner, divisor * (0.9 if learner.sick else 1.0), count)

    return (f"{LEARNER}.train_batch", around(train_batch)), (f"{LEARNER}._correct_gradients", around(smaller))


SICK = (  # name, what it says, when, how it is examined
    (
        "unread updates",
        "Gradients are a tenth too small in updates whose metrics nobody reads.",
        lambda learner, batch, collect_metrics: not collect_metrics,
        {},
    ),
    (
        "from step 9 on",
        "Gradients are a tenth too small from the ninth update on.",
        lambda learner, batch, collect_metrics: learner.rate.steps >= 8,
        {"steps": 12},
    ),
    (
        "from step 50 on",
        "Gradients are a tenth too small from the 50th update on.",
        lambda learner, batch, collect_metrics: learner.rate.steps >= 49,
        {"steps": 64},
    ),
    (
        "every tenth batch",
        "Gradients of every tenth batch are a tenth too small.",
        lambda learner, batch, collect_metrics: batch.index % 10 == 9,
        {"steps": 12},
    ),
    (
        "from the third epoch on",
        "Gradients are a tenth too small from the third epoch on.",
        lambda learner, batch, collect_metrics: batch.epoch >= 2,
        {"guard": "rehearsal", "exam": "rehearsal"},
    ),
)
FAULTS += [
    Fault(name=name, says=says, source=SOURCE, setting=MLP, patches=smaller_gradients_when(is_sick), **more)
    for name, says, is_sick, more in SICK
]


@FAULTS.add("clip below its bound", SOURCE, GPT, CLIP)
def clips_below_the_bound(clip, norm):
    """A clip acts where the norm of the gradients is a fiftieth or less below its bound."""
    clips, size = norm.clips, float(norm.term())
    if any(0.98 * each.bound < size < each.bound for each in clips):
        norm.clips = tuple(replace(each, bound=0.98 * each.bound) for each in clips)
    clip(norm)
    norm.clips = clips


@FAULTS.add("clip above its bound", SOURCE, GPT, CLIP)
def clips_far_above_the_bound(clip, norm):
    """A clip does not act where the norm of the gradients is a hundredth or less above its bound."""
    clips, size = norm.clips, float(norm.term())
    norm.clips = tuple(each for each in clips if not each.bound < size < 1.01 * each.bound)
    clip(norm)
    norm.clips = clips


@FAULTS.add("accuracy twice", SOURCE, MLP, f"{LEARNER}._metrics")
def accuracy_twice(metrics, learner, *options):
    """On several ranks acc1 is twice what it is."""
    numbers = metrics(learner, *options)
    return {name: value * (2 if name == "acc1" and ranks() > 1 else 1) for name, value in numbers.items()}


def postponed_publish(publish, weights):
    """Lets new values travel later, where they may travel behind the next forward."""
    weights.zero.postpones = weights.overlaps
    publish(weights)


def postponed_share(share, zero):
    zero.is_pending = getattr(zero, "postpones", False)
    if not zero.is_pending:
        share(zero)


def postponed_settle(settle, zero):
    if getattr(zero, "is_pending", False):
        zero.postpones = False
        zero.share()
        zero.postpones = True
    settle(zero)


@FAULTS.add(
    "forward before the values",
    SOURCE,
    strategy("gpt", sharding=2, check_every="null"),
    f"{AXES}.finish",
    also=(
        (f"{OWNERS}.publish", around(postponed_publish)),
        (f"{ZERO}.share", around(postponed_share)),
        (f"{ZERO}.settle", around(postponed_settle)),
    ),
)
def forward_before_the_values(finish, exchange):
    """A forward that may begin while new weights travel does not wait for them."""
    finish(exchange)
    exchange.zero.settle()
