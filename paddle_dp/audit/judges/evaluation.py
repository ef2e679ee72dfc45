"""Judges evaluations: whether each sample counts once, and whether the ranks' numbers are combined correctly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paddle_dp.audit.events import Batches, Ended, Exchanged, LoaderCreated, PassBegan, Stepped
from paddle_dp.audit.finding import AuditFinding, ReportSection
from paddle_dp.audit.records import EventTrace, Rank
from paddle_dp.text import few, plural

GATHERS = ("all_gather", "all_gather_object", "gather", "recv")


def evaluation(trace: EventTrace) -> ReportSection:
    coverage, findings = [], list[AuditFinding]()
    for loader in sorted({pass_key[0] for rank in trace.ranks for pass_key in rank.passes} - trace.training):
        loader_event, orders = trace.loader(loader), trace.orders(loader, 1)
        known = [order for order in orders if order is not None]
        if loader_event is None or not known:
            continue
        coverage.append(
            f"{loader_event.samples} samples ({loader_event.dataset}) on {plural(len(known), 'rank')}"
        )
        if len(known) == len(trace.ranks) > 1:
            begun = trace.ranks[0].passes[loader, 1]
            findings += _reads(trace, loader_event, begun, known)
            findings += _numbers(trace, loader_event, begun, known)
    if not coverage:
        coverage = ["no loader was read without training"]
        if any(rank.ended and rank.ended.reason == "limit" for rank in trace.ranks):
            coverage += [
                "the audit ended the script after two epochs and saw no later one: to audit an evaluation at the "
                "end, let the script train two epochs only"
            ]
    return ReportSection("evaluation", "; ".join(coverage), tuple(findings))


def _reads(
    trace: EventTrace, loader_event: LoaderCreated, begun: PassBegan, orders: list[Batches]
) -> Iterator[AuditFinding]:
    """Findings for held-out samples that are read twice or never; every rank reading all of them is no mistake."""
    reads = [[index for batch in order for index in batch] for order in orders]
    if all(len(set(each)) == loader_event.samples == len(each) for each in reads):
        return
    counts = Counter(index for each in reads for index in each)
    twice = sorted(index for index, count in counts.items() if count > 1)
    never = sorted(set(range(loader_event.samples or 0)) - counts.keys())
    if twice and not begun.managed:
        collectives, _ = window(trace.ranks[0], loader_event.loader)
        gathered = any(event.collective in GATHERS for event in collectives)
        extra = sum(counts.values()) - len(counts)
        yield AuditFinding(
            rule="evaluation-repeats", severity="note" if gathered else "fault", where=begun.where,
            what=f"an evaluation counts {plural(len(twice), 'sample')} of {loader_event.samples} more than once",
            evidence=f"{plural(extra, 'read')} too many: {few(twice)}"
            + ("; outputs are gathered, and the script may drop the repeats" if gathered else ""),
            remedy="read range(rank, n, ranks) in batches, without padding, and all_reduce totals and counts",
        )  # fmt: skip
    if never:
        yield AuditFinding(
            rule="evaluation-gaps", severity="fault", where=begun.where,
            what=f"an evaluation leaves {plural(len(never), 'sample')} of {loader_event.samples} out",
            evidence=f"on no rank: {few(never)}" + ("; drop_last is set" if loader_event.drop_last else ""),
            remedy="evaluate without drop_last, every index on one rank",
        )  # fmt: skip


def _numbers(
    trace: EventTrace, loader_event: LoaderCreated, begun: PassBegan, orders: list[Batches]
) -> Iterator[AuditFinding]:
    """Findings on the combination of the ranks' numbers."""
    shares = [sum(map(len, order)) for order in orders]
    if begun.managed or all(share == loader_event.samples for share in shares):
        return
    windows = [window(rank, loader_event.loader) for rank in trace.ranks]
    if not all(closed for _, closed in windows):
        return
    exchanged = [[event for event in events if event.collective != "barrier"] for events, _ in windows]
    read = [sum(batch.size for batch in rank.first_pass(loader_event.loader)) for rank in trace.ranks]
    if not any(exchanged):
        yield AuditFinding(
            rule="evaluation-not-combined", severity="fault", where=begun.where,
            what="each rank evaluates its own share, and nothing is exchanged: the result covers one rank's part only",
            evidence=f"rank 0 reads {shares[0]} of {loader_event.samples} samples, and no collective follows",
            remedy="all_reduce the total and the count of samples, and divide afterwards",
        )  # fmt: skip
    elif len(set(shares)) > 1 and (values := _means(exchanged, read)):
        plain = sum(values) / len(values)
        right = sum(v * n for v, n in zip(values, read, strict=True)) / sum(read)
        yield AuditFinding(
            rule="evaluation-mean-of-means", severity="fault", where=exchanged[0][0].where,
            what=f"a mean of the ranks' means is reported, over unequal shares ({few(shares)} samples)",
            evidence=f"over {few(read)} samples the ranks gave {few([round(v, 4) for v in values])}: "
            f"their mean is {plain:.4f}, the mean over all samples {right:.4f}",
            remedy="all_reduce the total and the count of samples, and divide afterwards",
        )  # fmt: skip


def _means(exchanged: list[list[Exchanged]], read: list[int]) -> list[float]:
    """The ranks' reduced numbers, if they are means without a count of the samples that each rank has `read`."""
    reduced = [
        [e for e in events if e.collective in ("all_reduce", "reduce") and e.values] for events in exchanged
    ]
    if not all(reduced):
        return []
    values = [[value for event in events for value in event.values] for events in reduced]
    counted = all(n in rank_values for n, rank_values in zip(read, values, strict=True))
    first = [rank_values[0] for rank_values in values]
    are_integers = all(value == int(value) for value in first if value == value and abs(value) < 1e15)
    return [] if counted or are_integers else first


def window(rank: Rank, loader: int) -> tuple[list[Exchanged], bool]:
    """The collectives after the first pass over a loader, until the next pass or update; whether that end was seen."""
    collectives: list[Exchanged] = []
    inside = False
    for event in rank.events:
        if isinstance(event, PassBegan) and (event.loader, event.number) == (loader, 1):
            inside = True
        elif inside and isinstance(event, PassBegan | Stepped):
            return collectives, True
        elif inside and isinstance(event, Ended):
            return collectives, event.reason == "script"
        elif inside and isinstance(event, Exchanged):
            collectives.append(event)
    return collectives, False
