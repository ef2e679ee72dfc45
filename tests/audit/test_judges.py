"""What is said of records that were made by hand: each rule found where it holds, and silent where it does not."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from numpy.random import RandomState
from paddle.io import DistributedBatchSampler

from paddle_dp.audit.audit import AuditResult
from paddle_dp.audit.events import (
    Ended,
    EventJournal,
    Exchanged,
    Fetched,
    LoaderCreated,
    PassBegan,
    Seeded,
    Stepped,
)
from paddle_dp.audit.finding import AuditFinding, ReportSection
from paddle_dp.audit.judges.evaluation import evaluation
from paddle_dp.audit.judges.gradients import Update, judge
from paddle_dp.audit.judges.randomness import randomness
from paddle_dp.audit.judges.samples import samples, shares
from paddle_dp.audit.judges.weights import weights
from paddle_dp.audit.records import EventTrace

STATES = {"paddle": "a", "numpy": "b", "random": "c"}


def made(samples, batch=4, sampler="BatchSampler", **words):
    told = {"loader": 0, "dataset": "D", "drop_last": False, "workers": 0, "where": "train.py:9", **words}
    return LoaderCreated(samples=samples, batch_size=batch, sampler=sampler, **told)


def rules(findings):
    return [finding.rule for finding in findings]


def padded(samples, batch, ranks, **words):
    """What Paddle's own sampler gives each of `ranks` ranks."""
    each = [
        DistributedBatchSampler(range(samples), batch, num_replicas=ranks, rank=r, **words)
        for r in range(ranks)
    ]
    return [tuple(map(tuple, sampler)) for sampler in each]


@pytest.mark.parametrize(("samples", "ranks"), [(48, 2), (48, 3), (12, 4), (6, 2), (4, 4)])
def test_equal_shares_are_right(samples, ranks):
    orders = padded(samples, 4, ranks, shuffle=True)
    assert not list(shares(made(samples, sampler="DistributedBatchSampler"), orders))


def test_padding_names_the_very_samples():
    (finding,) = shares(made(31, sampler="DistributedBatchSampler"), padded(31, 4, 2))
    assert (finding.rule, finding.severity) == ("samples-padded", "difference")
    assert "1 sample of 31" in finding.what and finding.evidence == "1 read too many: 0"


def drawn(seed, samples):
    """Five batches of four of so many samples."""
    return tuple(map(tuple, RandomState(seed).permutation(samples)[:20].reshape(5, 4).tolist()))


def test_every_rank_drawing_from_all_samples_is_found():
    orders = [drawn(seed, 20) for seed in range(2)]
    (finding,) = shares(made(20), orders)
    assert finding.rule == "samples-not-shared" and "draws from all 20 samples" in finding.what
    both = len(set(orders[0][0]) & set(orders[1][0]))
    assert finding.evidence.startswith("40 reads of 20") and finding.evidence.endswith(f"in both: {both}")
    (same,) = shares(made(20), [orders[0]] * 2)
    assert "same batches" in same.what


def test_drop_last_of_every_rank_does_not_hide_it():
    assert rules(shares(made(22, drop_last=True), [drawn(1, 22), drawn(2, 22)])) == ["samples-not-shared"]


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ([((0, 1), (2,)), ((3, 4), (5,))], []),
        ([((0, 1), (2, 3)), ((3, 4), (5, 0))], ["samples-twice"]),
        ([((0, 1),), ((3, 4),)], ["samples-never"]),
        ([((0, 1), (2,)), ((3, 4, 5),)], ["steps-uneven"]),
    ],
)
def test_overlap_gaps_and_uneven_steps(orders, expected):
    assert rules(shares(made(6, batch=2), orders)) == expected


def test_what_one_process_would_drop_too_is_no_gap():
    assert not list(shares(made(7, batch=2, drop_last=True), [((0, 1),), ((2, 3),)]))
    assert rules(shares(made(8, batch=2, drop_last=True), [((0, 1),), ((2, 3),)])) == ["samples-never"]


def test_drawing_with_replacement_is_a_choice():
    orders = [tuple(map(tuple, RandomState(s).randint(0, 40, (5, 4)).tolist())) for s in (0, 1)]
    assert not list(shares(made(40), orders))


def test_batches_without_ranks_that_read_nothing_twice_on_one_rank():
    assert not list(shares(made(4, batch=2), [((0, 1), (2, 3))]))


# --- gradients: g_r are each rank's own, made from samples by hand -------------------------------------------------


def update(final, sizes=(4, 4), one="mean", drew=False):
    """An update of a linear model y = w x over samples whose gradients are known: rank r's own is its samples' mean."""
    per_sample = RandomState(3).normal(size=(sum(sizes), 6))
    parts = np.split(per_sample, [sizes[0]])
    own = [part.mean(0) for part in parts]
    summed = [part.sum(0) for part in parts]
    truth = {"mean": per_sample.mean(0), "sum": per_sample.sum(0)}
    finals = final(own if one != "sum" else summed)
    each = own if one != "sum" else summed
    return Update(
        step=1,
        source_line="train.py:9",
        local=tuple({"w": g} for g in each),
        final=tuple({"w": f} for f in finals),
        sizes=sizes,
        drew=drew,
        reference=None if one is None else {"w": truth[one]},
    )


def mean(own):
    return [np.mean(own, 0)] * 2


@pytest.mark.parametrize(
    ("final", "words", "said"),
    [
        (mean, {}, None),
        (mean, {"one": None}, None),
        (lambda own: own, {}, "no gradient is exchanged"),
        (lambda own: own, {"one": None}, "no gradient is exchanged"),
        (lambda own: [np.sum(own, 0)] * 2, {}, "summed, and not averaged"),
        (lambda own: [np.sum(own, 0)] * 2, {"one": None}, "summed, and not averaged"),
        (lambda own: [np.mean(own, 0) / 2] * 2, {}, "averaged twice"),
        (lambda own: [np.mean(own, 0) / 2] * 2, {"one": None}, "averaged twice"),
        (mean, {"one": "sum"}, "the loss is a sum over samples"),
        (mean, {"one": "sum", "sizes": (5, 3)}, "the loss is a sum over samples"),
        (lambda own: [np.sum(own, 0)] * 2, {"sizes": (5, 3)}, "summed, and not averaged"),
        (lambda own: [np.mean(own, 0) / 2] * 2, {"sizes": (5, 3)}, "averaged twice"),
        (mean, {"sizes": (13, 12)}, "mean of means over unequal shares (13 and 12 samples)"),
        (mean, {"sizes": (13, 12), "one": None}, "mean of means over unequal shares (13 and 12 samples)"),
        (lambda own: [(13 * own[0] + 12 * own[1]) / 25] * 2, {"sizes": (13, 12)}, None),
        (lambda own: [np.mean(own, 0)[::-1]] * 2, {}, "is not one process's on the same samples"),
        (mean, {"drew": True}, None),
    ],
)  # fmt: skip
def test_what_the_exchange_did_is_told(final, words, said):
    found = list(judge(update(final, **words)))
    assert [said in finding.what for finding in found] == ([True] if said else []), found
    unsure = words.get("one", "mean") is None and said != "no gradient is exchanged"
    assert all(finding.severity == ("note" if unsure else "fault") for finding in found)


@pytest.mark.parametrize("words", [{"drew": True}, {"local_norms": True}])
def test_where_one_process_differs_by_nature_only_the_size_is_judged(words):
    turned = RandomState(9).normal(size=6)  # another direction than the mean's

    def case(final):
        made = update(final, drew=words.get("drew", False))
        length = np.linalg.norm(made.reference["w"])
        return replace(
            made, reference={"w": made.reference["w"] + 0.3 * length * turned / np.linalg.norm(turned)}
        )

    local = words.get("local_norms", False)
    assert not list(judge(case(mean), local))
    (plain,) = judge(replace(case(mean), drew=False))
    assert plain.rule == "other-gradient"
    (summed,) = judge(case(lambda own: [np.sum(own, 0)] * 2), local)
    assert summed.rule == "wrong-scale" and "summed" in summed.what


def test_the_error_of_a_mean_of_means_is_the_true_one():
    case = update(mean, sizes=(13, 12))
    (finding,) = judge(case)
    samples = RandomState(3).normal(size=(25, 6))
    truth = samples.mean(0)
    off = np.linalg.norm((samples[:13].mean(0) + samples[13:].mean(0)) / 2 - truth) / np.linalg.norm(truth)
    assert f"{off:.2%} away" in finding.evidence


def test_the_one_parameter_that_is_not_exchanged_is_named():
    draw = RandomState(0)
    own = [{"a": draw.normal(size=3), "b": draw.normal(size=3)} for _ in range(2)]
    both = {name: (own[0][name] + own[1][name]) / 2 for name in "ab"}
    case = Update(
        step=2, source_line="", local=tuple(own), sizes=(4, 4), drew=False, reference=both,
        final=tuple({"a": both["a"], "b": mine["b"]} for mine in own),
    )  # fmt: skip
    (finding,) = judge(case)
    assert (
        finding.what.startswith("1 of 2 gradients not exchanged") and "own gradient in b;" in finding.evidence
    )


# --- whole records -------------------------------------------------------------------------------------------------


@pytest.fixture
def record(tmp_path):
    """Writes each rank's events by the real journal, and reads them back."""

    def write(*ranks):
        for number, events in enumerate(ranks):
            journal = EventJournal(tmp_path, number)
            for event in events:
                journal.write(event)
        return EventTrace.read(tmp_path, len(ranks))

    return write


def passed(loader, batches, number=1, drew=(), managed=False):
    how = {"drew": drew, "managed": managed, "where": "train.py:20"}
    return PassBegan(loader=loader, number=number, batches=batches, **how)


def fetched(loader, index, size, number=1, drew=(), states=None):
    drawn = {"rows": (), "drew": drew, "states": states or STATES}
    return Fetched(loader=loader, number=number, index=index, size=size, **drawn)


def stepped(digests, batches=((0, 1, 0),), drew=False, missing=()):
    return Stepped(
        optimizer=0, digests=digests, missing=missing, batches=batches, drew=drew, scale=1.0, arrays="",
        where="train.py:30",
    )  # fmt: skip


def test_a_cut_off_line_is_left_out(record, tmp_path):
    trace = record([Seeded(generator="paddle", value="1")])
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('["Ended", {"where": "", "rea')
    assert EventTrace.read(tmp_path, 1).ranks[0].events == trace.ranks[0].events


def test_a_forked_process_writes_nothing(tmp_path):
    journal = EventJournal(tmp_path, 0)
    journal.write(Seeded(generator="numpy", value="1"))
    child = os.fork()
    if not child:
        journal.write(Seeded(generator="numpy", value="2"))
        os._exit(0)
    os.waitpid(child, 0)
    assert len(EventTrace.read(tmp_path, 1).ranks[0].events) == 1


def test_diverging_weights_are_told_from_the_update_that_did_it(record):
    same, other = {"w": "1", "b": "2"}, {"w": "9", "b": "2"}
    trace = record([stepped(same), stepped(same)], [stepped(same), stepped(other)])
    (finding,) = weights(trace).findings
    assert finding.rule == "weights-diverge" and "from update 1 on: 1 of 2" in finding.what
    assert finding.evidence.endswith("w") and finding.where == "train.py:30"
    assert not weights(record([stepped(same)], [stepped(same)])).findings
    (start,) = weights(record([stepped(same)], [stepped(other)])).findings
    assert start.rule == "weights-differ-at-start"


def test_a_gradient_on_one_rank_only(record):
    w = {"w": "1"}
    (finding,) = weights(record([stepped(w)], [stepped(w, missing=("w",))])).findings
    assert finding.rule == "gradient-missing" and finding.evidence == "w: none on rank 1"


def held_out(orders, events, managed=False, reason="script"):
    """Each rank's events of one evaluation over loader 1."""
    return [
        [
            made(sum(map(len, orders[0])) if len(orders) == 1 else 9, loader=1),
            passed(1, order, managed=managed),
            *(fetched(1, n, len(batch)) for n, batch in enumerate(order)),
            *own,
            Ended(reason=reason),
        ]
        for order, own in zip(orders, events, strict=True)
    ]


def reduced(*values):
    return Exchanged(collective="all_reduce", values=values, where="train.py:40")


SHARED = [((0, 2, 4, 6), (8,)), ((1, 3, 5, 7),)]
REPEATED = [tuple(map(tuple, order)) for order in padded(9, 4, 2)]
WHOLE = [((0, 1, 2, 3), (4, 5, 6, 7), (8,))] * 2


@pytest.mark.parametrize(
    ("orders", "events", "expected"),
    [
        (SHARED, [[reduced(4.0, 5.0)], [reduced(3.0, 4.0)]], []),  # totals and counts
        (SHARED, [[reduced(4.0)], [reduced(3.0)]], []),  # a total; the count is known
        (SHARED, [[], []], ["evaluation-not-combined"]),
        (SHARED, [[reduced(0.8)], [reduced(0.5)]], ["evaluation-mean-of-means"]),
        (WHOLE, [[], []], []),
        (REPEATED, [[reduced(0.8)], [reduced(0.6)]], ["evaluation-repeats"]),
        ([((0, 2),), ((1, 3),)], [[reduced(2.0, 2.0)]] * 2, ["evaluation-gaps"]),
    ],
)
def test_evaluations(record, orders, events, expected):
    assert rules(evaluation(record(*held_out(orders, events))).findings) == expected


def test_what_paddle_model_evaluates_is_trimmed_by_paddle(record):
    assert not evaluation(record(*held_out(REPEATED, [[], []], managed=True))).findings


def test_an_evaluation_that_the_audit_cut_off_is_not_blamed_for_what_would_have_come(record):
    assert not evaluation(record(*held_out(SHARED, [[], []], reason="limit"))).findings


@pytest.mark.parametrize("reason", ["limit", "script"])
def test_an_evaluation_after_the_audits_end_is_not_called_absent(record, reason):
    coverage = evaluation(record([Ended(reason=reason)], [Ended(reason=reason)])).coverage
    assert ("the audit ended the script after two epochs" in coverage) == (reason == "limit")


def test_a_mean_of_means_in_evaluation_has_both_numbers(record):
    (finding,) = evaluation(record(*held_out(SHARED, [[reduced(0.8)], [reduced(0.5)]]))).findings
    assert (
        f"their mean is {(0.8 + 0.5) / 2:.4f}, the mean over all samples {(0.8 * 5 + 0.5 * 4) / 9:.4f}"
        in finding.evidence
    )


def trained(*drawn, seeds=(), order=(), masks=False, states=None):
    events = [Seeded(generator=name, value="1", where="train.py:3") for name in seeds]
    events += [made(8), passed(0, ((0, 1), (2, 3)), drew=order)]
    events += [fetched(0, n, 2, drew=drawn, states=states) for n in range(2)]
    return [*events, stepped({"w": "1"}, drew=masks)]


def drifting(*drawn, **words):
    """As `trained`, but the generators are elsewhere at the second batch."""
    events = trained(*drawn, **words)
    last = max(n for n, event in enumerate(events) if isinstance(event, Fetched))
    return [*events[:last], replace(events[last], states={**STATES, "numpy": "z"}), *events[last + 1 :]]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([trained(seeds=["paddle", "numpy"])] * 2, []),
        ([trained(order=("numpy",))] * 2, ["unseeded-order"]),
        ([trained(order=("numpy",), seeds=["numpy"])] * 2, []),
        ([trained("numpy")] * 2, ["unseeded-data"]),
        ([trained("numpy", seeds=["numpy"])] * 2, ["same-augmentation"]),
        ([trained("numpy", seeds=["numpy"], states={**STATES, "numpy": state}) for state in "bz"], []),
        ([trained("numpy", seeds=["numpy"]), drifting("numpy", seeds=["numpy"])], []),
        ([trained(masks=True)] * 2, ["same-masks"]),
        ([trained(masks=True), trained(masks=True, states={**STATES, "paddle": "z"})], ["other-masks"]),
    ],
)
def test_randomness(record, ranks, expected):
    assert rules(randomness(record(*ranks), None).findings) == expected


def twice(first, second):
    """A rank's events of two passes."""
    return [made(4), passed(0, first), fetched(0, 0, 2), stepped({"w": "1"}), passed(0, second, number=2)]


def test_an_order_that_comes_again(record):
    first = ((2, 0), (3, 1))
    assert rules(samples(record(twice(first, first))).findings) == ["order-repeats"]
    assert not samples(record(twice(first, ((0, 2), (3, 1))))).findings


def test_an_order_that_is_not_shuffled_may_come_again(record):
    assert not samples(record(*(twice((batch,), (batch,)) for batch in ((0, 1), (2, 3))))).findings


# --- the report ----------------------------------------------------------------------------------------------------


def outcome(*severities, failure=""):
    found = tuple(
        AuditFinding(rule="r", severity=s, what="w", evidence="e", where="t.py:1", remedy="d")
        for s in severities
    )
    return AuditResult("t.py", 2, 3, (ReportSection("samples", "looked", found),), failure)


@pytest.mark.parametrize(
    ("case", "status", "last"),
    [
        (outcome(), 0, "t.py: nothing found in"),
        (outcome("note"), 0, "t.py: nothing found in"),
        (outcome("difference", "note", "fault"), 1, "t.py: 1 fault and 1 difference found in"),
        (outcome(failure="It broke."), 3, "t.py: could not be audited:"),
        (outcome("fault", failure="It broke."), 1, "t.py: 1 fault and 0 differences found in"),
    ],
)
def test_exit_statuses_and_last_words(case, status, last):
    assert (case.exit_status, list(case.lines())[-1]) == (status, f"{last} 3 steps on 2 ranks.")
    assert json.loads(case.as_json())["exit_status"] == status


def test_the_worst_is_first():
    severities = ["fault", "difference", "note"]
    assert [finding.severity for finding in outcome(*reversed(severities)).findings] == severities
