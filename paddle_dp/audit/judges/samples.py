"""Judges the samples that an epoch of training reads over all ranks: each once, or some twice or never."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paddle_dp.audit.events import Batches, LoaderCreated
from paddle_dp.audit.finding import AuditFinding, ReportSection
from paddle_dp.audit.records import EventTrace
from paddle_dp.text import few, plural

REMEDY = (
    "DataLoader(dataset, batch_sampler=paddle.io.DistributedBatchSampler(dataset, batch_size, shuffle=True))"
)


def samples(trace: EventTrace) -> ReportSection:
    """Judges the reads of each training loader, by index, or by content for a stream."""
    coverage, findings = [], []
    for loader in sorted(trace.training):
        loader_event = trace.loader(loader)
        orders = trace.orders(loader, 1)
        known = [order for order in orders if order is not None]
        if loader_event is None:
            continue
        if len(known) < len(orders):
            rows = [[row for batch in rank.first_pass(loader) for row in batch.rows] for rank in trace.ranks]
            coverage.append(f"{sum(map(len, rows))} samples of {loader_event.dataset}, by their content")
            findings += [*streams(loader_event, rows)]
            continue
        reads = sum(len(batch) for order in known for batch in order)
        coverage.append(
            f"{plural(reads, 'read')} of one epoch over {loader_event.samples} samples ({loader_event.dataset})"
        )
        findings += [*shares(loader_event, known), *_repeated_order(trace, loader_event, known)]
    unknown = "no DataLoader was seen in training: which samples are read is not known"
    return ReportSection("samples", "; ".join(coverage) or unknown, tuple(findings))


def shares(loader_event: LoaderCreated, orders: list[Batches]) -> Iterator[AuditFinding]:
    """Findings on the ranks' shares of one epoch's samples; `orders`: each rank's batches."""
    ranks, total = len(orders), loader_event.samples or 0
    reads = [[index for batch in order for index in batch] for order in orders]
    counts = Counter(index for each in reads for index in each)
    never = sorted(set(range(total)) - counts.keys())
    if len({len(order) for order in orders}) > 1:
        yield AuditFinding(
            rule="steps-uneven", severity="fault", where=loader_event.where,
            what="the ranks have different numbers of batches: the job hangs at the end of the epoch",
            evidence=", ".join(f"rank {n}: {plural(len(o), 'batch', 'batches')}" for n, o in enumerate(orders)),
            remedy="give every rank as many batches: DistributedBatchSampler, or drop_last on equal shares",
        )  # fmt: skip
    missed = max(total - len(set(each)) for each in reads)  # drop_last may leave them out on each rank
    twice = sorted(index for index, count in counts.items() if count > 1)
    if ranks > 1 and missed < max(loader_event.batch_size or 1, 1) and 2 * len(twice) > total:
        yield _not_shared(loader_event, orders, counts)
        return
    replaced = min(len(each) - len(set(each)) for each in reads)
    if replaced > ranks:
        return  # every rank draws with replacement: a weighted sampler does so on one process, too
    if twice:
        yield _twice(loader_event, twice, counts)
    size = sum(len(order[0]) for order in orders if order)
    if never and not (loader_event.drop_last and size and len(never) <= total % size):
        yield AuditFinding(
            rule="samples-never", severity="fault", where=loader_event.where,
            what=f"{len(never)} of {plural(total, 'sample')} never read in an epoch",
            evidence=f"on no rank: {few(never)}", remedy=f"share all indices among the ranks: {REMEDY}",
        )  # fmt: skip


def _not_shared(loader_event: LoaderCreated, orders: list[Batches], counts: Counter[int]) -> AuditFinding:
    """The finding that every rank draws from all samples."""
    first = [order[0] for order in orders]
    often = Counter(counts.values()).most_common(1)[0][0]
    same = all(order == orders[0] for order in orders)
    shown = "; ".join(f"rank {n} [{few(batch)}]" for n, batch in enumerate(first[:2]))
    together = Counter(index for batch in first for index in set(batch))
    problem = "all ranks read the same batches: the job computes one rank's gradient several times" if same else (
        f"every rank draws from all {loader_event.samples} samples: an epoch reads each {often} times"
    )  # fmt: skip
    return AuditFinding(
        rule="samples-not-shared", severity="fault", where=loader_event.where, what=problem, remedy=REMEDY,
        evidence=f"{sum(counts.values())} reads of {loader_event.samples} samples; first batch: {shown}; "
        f"in both: {sum(count > 1 for count in together.values())}",
    )  # fmt: skip


def _twice(loader_event: LoaderCreated, twice: list[int], counts: Counter[int]) -> AuditFinding:
    padded = "DistributedBatchSampler" in loader_event.sampler
    extra = sum(counts[index] - 1 for index in twice)
    are = "is" if len(twice) == 1 else "are"
    return AuditFinding(
        rule="samples-padded" if padded else "samples-twice", severity="difference" if padded else "fault",
        what=f"{plural(len(twice), 'sample')} of {loader_event.samples} {are} read more than once in an epoch"
        + (", to fill the ranks' shares up" if padded else ""),
        evidence=f"{plural(extra, 'read')} too many: {few(twice)}", where=loader_event.where,
        remedy="a data set whose length the ranks divide, or a sampler with unequal last batches and a weighted loss"
        if padded else "give each rank indices that no other rank has",
    )  # fmt: skip


def _repeated_order(
    trace: EventTrace, loader_event: LoaderCreated, first: list[Batches]
) -> Iterator[AuditFinding]:
    """A finding if the second epoch repeats the shuffled order of the first."""
    second = trace.orders(loader_event.loader, 2)
    reads = [index for batch in first[0] for index in batch]
    if second == first and reads != sorted(reads):
        yield AuditFinding(
            rule="order-repeats", severity="fault", where=loader_event.where,
            what="the second epoch has the first one's shuffled order again",
            evidence=f"both begin with [{few(reads)}] on rank 0, on all {plural(len(first), 'rank')} alike",
            remedy="call batch_sampler.set_epoch(epoch) with the number of the epoch, or seed the order by it",
        )  # fmt: skip


def streams(loader_event: LoaderCreated, rows: list[list[str]]) -> Iterator[AuditFinding]:
    """Findings on samples without indices, by digests of their content; `rows`: each rank's, in order."""
    if not all(rows):
        return
    within = [len(each) - len(set(each)) for each in rows]
    common = set.intersection(*map(set, rows))
    if len(rows) > 1 and common:
        yield AuditFinding(
            rule="samples-not-shared", severity="fault", where=loader_event.where,
            what=f"the ranks read the same samples of {loader_event.dataset}",
            evidence=f"{len(common)} of the {len(set(rows[0]))} different samples that rank 0 has read "
            "are bit for bit the others', too",
            remedy="let each rank skip the others' samples: yield only every paddle.distributed.get_world_size()-th",
        )  # fmt: skip
    elif loader_event.workers > 1 and max(within) > 0:
        yield AuditFinding(
            rule="samples-twice", severity="fault", where=loader_event.where,
            what=f"the {loader_event.workers} workers of a rank read the same samples of {loader_event.dataset}",
            evidence=f"{max(within)} of {len(rows[within.index(max(within))])} samples of a rank are repeats",
            remedy="share a stream among its workers with paddle.io.get_worker_info()",
        )  # fmt: skip
