"""Judges random numbers: unseeded ones, with which two runs differ, and ones that are the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator

from paddle_dp.audit.events import OptimizerMade, Seeded, Wrapped
from paddle_dp.audit.finding import Finding, Section, few, plural
from paddle_dp.audit.records import Rank, Trace, same_loader

CALL = {"paddle": "paddle.seed(seed)", "numpy": "numpy.random.seed(seed)", "random": "random.seed(seed)"}


def randomness(trace: Trace, alone: Trace | None) -> Section:
    """`alone`: the run on one process, whose beginning shows whether a second run begins alike."""
    seeds = {(seed.generator, seed.where): seed.value for seed in trace.ranks[0].of(Seeded)}
    listed = [f"{generator} {value} ({where})" for (generator, where), value in seeds.items()]
    looked = f"seeds set by the script: {few(listed) or 'none'}"
    workers = max((made.workers for made in trace.ranks[0].loaders.values()), default=0)
    if workers:
        processes = plural(workers, "loader process", "loader processes")
        looked += f"; random numbers of the {processes} of each rank are not recorded"
    found = (*_first_weights(trace, alone), *_order(trace), *_data(trace), *_masks(trace))
    return Section("randomness", looked, found)


def _first_weights(trace: Trace, alone: Trace | None) -> Iterator[Finding]:
    mine = earliest(trace.ranks[0])
    if alone is not None and (other := earliest(alone.ranks[0])):
        apart = sorted(name for name in mine.keys() & other.keys() if mine[name] != other[name])
        evidence = f"rank 0's and those of a second run on one process: {few(apart, 3)} differ"
    else:
        ranks = [earliest(rank) for rank in trace.ranks]
        seeded = any(seed.generator == "paddle" for seed in trace.ranks[0].of(Seeded))
        apart = [] if seeded else sorted(n for n in mine if any(each.get(n) != mine[n] for each in ranks))
        evidence = f"before they were made equal, the ranks' own initial weights differed: {few(apart, 3)}"
    if apart:
        made = next(iter((*trace.ranks[0].of(Wrapped), *trace.ranks[0].of(OptimizerMade))), None)
        yield Finding(
            rule="unseeded-weights", severity="difference", where=made.where if made else "",
            what="two runs of the script begin with different weights", evidence=evidence,
            remedy="call paddle.seed(seed) before the model is built",
        )  # fmt: skip


def earliest(rank: Rank) -> dict[str, str]:
    """The first digests of each parameter, before anything made ranks equal."""
    first: dict[str, str] = {}
    for event in rank.events:
        if isinstance(event, Wrapped | OptimizerMade):
            first = {**(event.before if isinstance(event, Wrapped) else event.parameters), **first}
    return first


def _order(trace: Trace) -> Iterator[Finding]:
    seeded = {seed.generator for seed in trace.ranks[0].of(Seeded)}
    for loader in sorted(trace.training):
        begun, made = trace.ranks[0].passes.get((loader, 1)), same_loader(trace, loader)
        if begun is None or made is None:
            continue
        unseeded = [name for name in begun.drew if name not in seeded]
        if not unseeded:
            continue
        yield Finding(
            rule="unseeded-order", severity="difference", where=made.where,
            what="two runs of the script read their samples in different orders",
            evidence=f"{made.sampler} drew its order from the generator of {unseeded[0]}, which the script never seeds",
            remedy=f"call {CALL[unseeded[0]]} at the start, or use DistributedBatchSampler, seeded by the epoch",
        )  # fmt: skip


def _data(trace: Trace) -> Iterator[Finding]:
    """Findings on random numbers drawn while data is read in this process, mostly for augmentation."""
    seeded = {seed.generator for seed in trace.ranks[0].of(Seeded)}
    for loader in sorted(trace.training):
        made = same_loader(trace, loader)
        batches = [[b for at, b in rank.fetched.items() if at[:2] == (loader, 1)] for rank in trace.ranks]
        drew = {name for each in batches[0] for name in each.drew}
        for name in sorted(drew & {"numpy", "random"}):
            if made is None:
                continue
            pairs = list(zip(*batches, strict=False))
            alike = sum(len({b.states[name] for b in pair}) == 1 for pair in pairs)
            if name not in seeded:
                yield Finding(
                    rule="unseeded-data", severity="difference", where=made.where,
                    what=f"random numbers from {name} go into the training batches, and are never seeded",
                    evidence=f"the generator moved while {plural(len(batches[0]), 'batch', 'batches')} were read",
                    remedy=f"call {CALL[name]} at the start, with another seed on each rank",
                )  # fmt: skip
            elif len(trace.ranks) > 1 and pairs and alike == len(pairs):
                yield Finding(
                    rule="same-augmentation", severity="difference", where=made.where,
                    what=f"the random numbers from {name} in the training batches are the same on all ranks",
                    evidence=f"the generator was in the same state on all ranks at each of {alike} batches",
                    remedy=f"seed {name} with another number on each rank: seed + paddle.distributed.get_rank()",
                )  # fmt: skip


def _masks(trace: Trace) -> Iterator[Finding]:
    """Findings on random numbers drawn between a batch and its update, mostly by dropout."""
    if not trace.steps or len(trace.ranks) < 2:
        return
    update = trace.together(1)
    if not all(each.drew and each.batches for each in update):
        return
    states = [
        rank.fetched[each.batches[0]].states["paddle"] for rank, each in zip(trace.ranks, update, strict=True)
    ]
    if len(set(states)) == 1:
        yield Finding(
            rule="same-masks", severity="difference", where=update[0].where,
            what="random layers (dropout) draw the same numbers on all ranks",
            evidence=f"Paddle's generator was in the same state ({states[0]}) on all ranks before update 1, and moved",
            remedy="call paddle.seed(seed + paddle.distributed.get_rank()) after the model is built",
        )  # fmt: skip
    else:
        yield Finding(
            rule="other-masks", severity="note", where=update[0].where,
            what="random layers (dropout) draw other numbers than one process would",
            evidence="Paddle's generator moved between the first batch and update 1",
            remedy="none is needed: only the masks differ, not what they are drawn from",
        )  # fmt: skip
