"""Judges random numbers: unseeded ones, which make two runs differ, and ones that are the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator

from paddle_dp.audit.events import OptimizerCreated, Seeded, Wrapped
from paddle_dp.audit.finding import AuditFinding, ReportSection
from paddle_dp.audit.records import EventTrace, Rank
from paddle_dp.text import few, plural

CALL = {"paddle": "paddle.seed(seed)", "numpy": "numpy.random.seed(seed)", "random": "random.seed(seed)"}


def randomness(trace: EventTrace, alone: EventTrace | None) -> ReportSection:
    """Judges seeds and draws; `alone`: the run on one process shows whether a second run begins alike."""
    seeds = {(seed.generator, seed.where): seed.value for seed in trace.ranks[0].events_of(Seeded)}
    listed = [f"{generator} {value} ({line})" for (generator, line), value in seeds.items()]
    coverage = f"seeds set by the script: {few(listed) or 'none'}"
    workers = max((loader_event.workers for loader_event in trace.ranks[0].loaders.values()), default=0)
    if workers:
        processes = plural(workers, "loader process", "loader processes")
        coverage += f"; random numbers of the {processes} of each rank are not recorded"
    findings = (*_first_weights(trace, alone), *_order(trace), *_data(trace), *_masks(trace))
    return ReportSection("randomness", coverage, findings)


def _first_weights(trace: EventTrace, alone: EventTrace | None) -> Iterator[AuditFinding]:
    digests = earliest(trace.ranks[0])
    if alone is not None and (other := earliest(alone.ranks[0])):
        differing = sorted(name for name in digests.keys() & other.keys() if digests[name] != other[name])
        evidence = f"rank 0's and a second run's on one process: {few(differing, 3)} differ"
    else:
        ranks = [earliest(rank) for rank in trace.ranks]
        differing = sorted(n for n in digests if any(each.get(n) != digests[n] for each in ranks))
        differing = [] if "paddle" in trace.ranks[0].seeded else differing
        evidence = (
            f"before they were made equal, the ranks' own initial weights differed: {few(differing, 3)}"
        )
    if differing:
        creation = trace.ranks[0].first(Wrapped) or trace.ranks[0].first(OptimizerCreated)
        yield AuditFinding(
            rule="unseeded-weights", severity="difference", where=creation.where if creation else "",
            what="two runs of the script begin with different weights", evidence=evidence,
            remedy="call paddle.seed(seed) before the model is built",
        )  # fmt: skip


def earliest(rank: Rank) -> dict[str, str]:
    """The first digests of each parameter, before anything made ranks equal."""
    first: dict[str, str] = {}
    for event in rank.events:
        if isinstance(event, Wrapped | OptimizerCreated):
            first = {**(event.before if isinstance(event, Wrapped) else event.parameters), **first}
    return first


def _order(trace: EventTrace) -> Iterator[AuditFinding]:
    for loader in sorted(trace.training):
        begun, loader_event = trace.ranks[0].passes.get((loader, 1)), trace.loader(loader)
        if begun is None or loader_event is None:
            continue
        unseeded = [name for name in begun.drew if name not in trace.ranks[0].seeded]
        if not unseeded:
            continue
        yield AuditFinding(
            rule="unseeded-order", severity="difference", where=loader_event.where,
            what="two runs of the script read their samples in different orders",
            evidence=f"{loader_event.sampler} drew its order from the generator of {unseeded[0]}, "
            "which the script never seeds",
            remedy=f"call {CALL[unseeded[0]]} at the start, or use DistributedBatchSampler, seeded by the epoch",
        )  # fmt: skip


def _data(trace: EventTrace) -> Iterator[AuditFinding]:
    """Findings on random numbers drawn while data is read, mostly for augmentation."""
    for loader in sorted(trace.training):
        loader_event = trace.loader(loader)
        batches = [rank.first_pass(loader) for rank in trace.ranks]
        drew = {name for each in batches[0] for name in each.drew}
        for name in sorted(drew & {"numpy", "random"}):
            if loader_event is None:
                continue
            pairs = list(zip(*batches, strict=False))
            alike = sum(len({b.states[name] for b in pair}) == 1 for pair in pairs)
            if name not in trace.ranks[0].seeded:
                yield AuditFinding(
                    rule="unseeded-data", severity="difference", where=loader_event.where,
                    what=f"random numbers from {name} go into the training batches, and are never seeded",
                    evidence=f"the generator moved while {plural(len(batches[0]), 'batch', 'batches')} were read",
                    remedy=f"call {CALL[name]} at the start, with another seed on each rank",
                )  # fmt: skip
            elif len(trace.ranks) > 1 and pairs and alike == len(pairs):
                yield AuditFinding(
                    rule="same-augmentation", severity="difference", where=loader_event.where,
                    what=f"the random numbers from {name} in the training batches are the same on all ranks",
                    evidence=f"the generator was in the same state on all ranks at each of {alike} batches",
                    remedy=f"seed {name} with another number on each rank: seed + paddle.distributed.get_rank()",
                )  # fmt: skip


def _masks(trace: EventTrace) -> Iterator[AuditFinding]:
    """Findings on random numbers drawn between a batch and its update, mostly by dropout."""
    if not trace.steps or len(trace.ranks) < 2:
        return
    update = trace.together(1)
    if not all(each.drew and each.batches for each in update):
        return
    pairs = zip(trace.ranks, update, strict=True)
    states = [rank.fetched[each.batches[0]].states["paddle"] for rank, each in pairs]
    if len(set(states)) == 1:
        yield AuditFinding(
            rule="same-masks", severity="difference", where=update[0].where,
            what="random layers (dropout) draw the same numbers on all ranks",
            evidence=f"Paddle's generator was in the same state ({states[0]}) on all ranks before update 1, and moved",
            remedy="call paddle.seed(seed + paddle.distributed.get_rank()) after the model is built",
        )  # fmt: skip
    else:
        yield AuditFinding(
            rule="other-masks", severity="note", where=update[0].where,
            what="random layers (dropout) draw other numbers than one process would",
            evidence="Paddle's generator moved between the first batch and update 1",
            remedy="none is needed: only the masks differ, not their distribution",
        )  # fmt: skip
