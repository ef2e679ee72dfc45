"""Judges the samples that an epoch of training reads over all ranks: each once, or some twice or never."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paddle_dp.audit.events import Batches, LoaderMade
from paddle_dp.audit.finding import Finding, Section, few, plural
from paddle_dp.audit.records import Trace, same_loader

REMEDY = (
    "DataLoader(dataset, batch_sampler=paddle.io.DistributedBatchSampler(dataset, batch_size, shuffle=True))"
)


def samples(trace: Trace) -> Section:
    looked, found = [], []
    for loader in sorted(trace.training):
        made = same_loader(trace, loader)
        orders = trace.orders(loader, 1)
        known = [order for order in orders if order is not None]
        if made is None:
            continue
        if len(known) < len(orders):
            rows = [_rows(trace, rank, loader) for rank in range(len(trace.ranks))]
            looked.append(f"{sum(map(len, rows))} samples of {made.dataset}, by their content")
            found += [*streams(made, rows)]
            continue
        reads = sum(len(batch) for order in known for batch in order)
        looked.append(f"{plural(reads, 'read')} of one epoch over {made.samples} samples ({made.dataset})")
        found += [*shares(made, known), *_again(trace, made, known)]
    unknown = "no DataLoader was seen in training: which samples are read is not known"
    return Section("samples", "; ".join(looked) or unknown, tuple(found))


def shares(made: LoaderMade, orders: list[Batches]) -> Iterator[Finding]:
    """Findings on how the ranks share the `made.samples` samples of one epoch; `orders`: each rank's batches."""
    ranks, total = len(orders), made.samples or 0
    reads = [[index for batch in order for index in batch] for order in orders]
    counts = Counter(index for each in reads for index in each)
    never = sorted(set(range(total)) - counts.keys())
    if len({len(order) for order in orders}) > 1:
        yield Finding(
            rule="steps-uneven", severity="fault", where=made.where,
            what="the ranks have different numbers of batches: the job hangs at the end of the epoch",
            evidence=", ".join(f"rank {n}: {plural(len(o), 'batch', 'batches')}" for n, o in enumerate(orders)),
            remedy="give every rank as many batches: DistributedBatchSampler, or drop_last on equal shares",
        )  # fmt: skip
    missed = max(total - len(set(each)) for each in reads)  # what drop_last may leave out on each rank
    twice = sorted(index for index, count in counts.items() if count > 1)
    if ranks > 1 and missed < max(made.batch_size or 1, 1) and 2 * len(twice) > total:
        yield _not_shared(made, orders, counts)
        return
    replaced = min(len(each) - len(set(each)) for each in reads)
    if replaced > ranks:
        return  # drawn with replacement on every rank: a weighted sampler does so on one process, too
    if twice:
        yield _twice(made, twice, counts)
    size = sum(len(order[0]) for order in orders if order)
    if never and not (made.drop_last and size and len(never) <= total % size):
        yield Finding(
            rule="samples-never", severity="fault", where=made.where,
            what=f"{len(never)} of {plural(total, 'sample')} never read in an epoch",
            evidence=f"on no rank: {few(never)}", remedy=f"share all indices among the ranks: {REMEDY}",
        )  # fmt: skip


def _not_shared(made: LoaderMade, orders: list[Batches], counts: Counter[int]) -> Finding:
    """The finding that every rank draws from all samples."""
    first = [order[0] for order in orders]
    often = Counter(counts.values()).most_common(1)[0][0]
    same = all(order == orders[0] for order in orders)
    shown = "; ".join(f"rank {n} [{few(batch)}]" for n, batch in enumerate(first[:2]))
    together = Counter(index for batch in first for index in set(batch))
    what = "all ranks read the same batches: the job computes one rank's gradient several times" if same else (
        f"every rank draws from all {made.samples} samples: an epoch reads each {often} times"
    )  # fmt: skip
    return Finding(
        rule="samples-not-shared", severity="fault", where=made.where, what=what, remedy=REMEDY,
        evidence=f"{sum(counts.values())} reads of {made.samples} samples; first batch: {shown}; "
        f"in both: {sum(count > 1 for count in together.values())}",
    )  # fmt: skip


def _twice(made: LoaderMade, twice: list[int], counts: Counter[int]) -> Finding:
    padded = "DistributedBatchSampler" in made.sampler
    extra = sum(counts[index] - 1 for index in twice)
    are = "is" if len(twice) == 1 else "are"
    return Finding(
        rule="samples-padded" if padded else "samples-twice", severity="difference" if padded else "fault",
        what=f"{plural(len(twice), 'sample')} of {made.samples} {are} read more than once in an epoch"
        + (", to fill the ranks' shares up" if padded else ""),
        evidence=f"{plural(extra, 'read')} too many: {few(twice)}", where=made.where,
        remedy="a data set whose length the ranks divide, or a sampler with unequal last batches and a weighted loss"
        if padded else "give each rank indices that no other rank has",
    )  # fmt: skip


def _again(trace: Trace, made: LoaderMade, first: list[Batches]) -> Iterator[Finding]:
    """A finding if the second epoch repeats the shuffled order of the first."""
    second = trace.orders(made.loader, 2)
    reads = [index for batch in first[0] for index in batch]
    if second == first and reads != sorted(reads):
        yield Finding(
            rule="order-repeats", severity="fault", where=made.where,
            what="the second epoch has the first one's shuffled order again",
            evidence=f"both begin with [{few(reads)}] on rank 0, on all {plural(len(first), 'rank')} alike",
            remedy="call batch_sampler.set_epoch(epoch) with the number of the epoch, or seed the order by it",
        )  # fmt: skip


def _rows(trace: Trace, rank: int, loader: int) -> list[str]:
    return [
        row for at, batch in trace.ranks[rank].fetched.items() if at[:2] == (loader, 1) for row in batch.rows
    ]


def streams(made: LoaderMade, rows: list[list[str]]) -> Iterator[Finding]:
    """Findings on samples without indices, by digests of their content; `rows`: each rank's, in order."""
    if not all(rows):
        return
    within = [len(each) - len(set(each)) for each in rows]
    common = set.intersection(*map(set, rows))
    if len(rows) > 1 and common:
        yield Finding(
            rule="samples-not-shared", severity="fault", where=made.where,
            what=f"the ranks read the same samples of {made.dataset}",
            evidence=f"{len(common)} of the {len(set(rows[0]))} different samples that rank 0 has read "
            "are bit for bit the others', too",
            remedy="let each rank skip what the others read: yield only every paddle.distributed.get_world_size()-th",
        )  # fmt: skip
    elif made.workers > 1 and max(within) > 0:
        yield Finding(
            rule="samples-twice", severity="fault", where=made.where,
            what=f"the {made.workers} workers of a rank read the same samples of {made.dataset}",
            evidence=f"{max(within)} of {len(rows[within.index(max(within))])} samples of a rank are repeats",
            remedy="share a stream among its workers with paddle.io.get_worker_info()",
        )  # fmt: skip
