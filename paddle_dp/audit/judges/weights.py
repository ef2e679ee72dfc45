"""Judges weights: whether all ranks hold the same, bit for bit, before every update and after the last one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paddle_dp.audit.events import FinalWeights, OptimizerCreated, Wrapped
from paddle_dp.audit.finding import AuditFinding, ReportSection
from paddle_dp.audit.records import EventTrace
from paddle_dp.text import few, plural


def weights(trace: EventTrace) -> ReportSection:
    """Judges the weights, and the gradients that only some ranks have."""
    if not trace.steps:
        return ReportSection("weights", "no update was done, so nothing was compared", ())
    names = list(trace.together(1)[0].digests)
    if len({tuple(update.digests) for update in trace.together(1)}) > 1:
        coverage = "the ranks hold different parts of a model, which are not compared"
        return ReportSection("weights", coverage, ())
    parameters, updates = plural(len(names), "parameter"), plural(trace.steps, "update")
    coverage = f"{parameters} on all ranks, bit for bit, before {updates} and after the last"
    return ReportSection("weights", coverage, (*_divergence(trace), *_missing(trace)))


def _divergence(trace: EventTrace) -> Iterator[AuditFinding]:
    step = trace.equal_until + 1
    left = [rank.events_of(FinalWeights) for rank in trace.ranks]
    ends = [each[0].digests for each in left if each]
    if step > trace.steps and (len(ends) < len(trace.ranks) or all(end == ends[0] for end in ends)):
        return
    digests = [update.digests for update in trace.together(step)] if step <= trace.steps else ends
    differing = [name for name in digests[0] if any(each[name] != digests[0][name] for each in digests)]
    size = _distance(trace, step)
    if step == 1:
        creation = trace.ranks[0].first(OptimizerCreated)
        wrapped = any(rank.events_of(Wrapped) for rank in trace.ranks)
        yield AuditFinding(
            rule="weights-differ-at-start", severity="fault", where=creation.where if creation else "",
            what=f"the ranks begin with different weights: {len(differing)} of {plural(len(digests[0]), 'parameter')}",
            evidence=f"before update 1: {few(differing, 3)}{size}",
            remedy="build the optimizer from the wrapped model's parameters" if wrapped
            else "put paddle.DataParallel around the model, or broadcast its parameters from rank 0",
        )  # fmt: skip
        return
    before = trace.together(step - 1)[0]
    share = f"{len(differing)} of {plural(len(digests[0]), 'parameter')}"
    yield AuditFinding(
        rule="weights-diverge", severity="fault", where=before.where,
        what=f"the ranks' weights differ from update {step - 1} on: {share}",
        evidence=f"equal before update {step - 1}, different after it: {few(differing, 3)}{size}",
        remedy="exchange every gradient before the update: paddle.DataParallel does, or all_reduce each and divide",
    )  # fmt: skip


def _distance(trace: EventTrace, step: int) -> str:
    """A clause on the largest recorded difference between ranks, in this update or at the end."""
    if step <= trace.steps and (array_files := [rank.updates[step - 1].arrays for rank in trace.ranks])[0]:
        files = [rank.arrays(name) for rank, name in zip(trace.ranks, array_files, strict=True)]
        files = [{k: v for k, v in file.items() if k.startswith("weight/")} for file in files]
        when = f"before update {step}"
    else:
        ends = [rank.first(FinalWeights) for rank in trace.ranks]
        files = [rank.arrays(end.arrays) if end else {} for rank, end in zip(trace.ranks, ends, strict=True)]
        when = "at the end"
    common = [name for name in files[0] if all(name in file for file in files)]
    pairs = ((name, file[name] - files[0][name]) for name in common for file in files)
    most, name = max(((float(np.abs(off).max(initial=0)), name) for name, off in pairs), default=(0.0, ""))
    if not most:
        return ""
    return f"; {when} up to {most:.2g} apart, in {name.removeprefix('weight/')}"


def _missing(trace: EventTrace) -> Iterator[AuditFinding]:
    """A finding for parameters that get a gradient on some ranks only."""
    for step in range(1, trace.steps + 1):
        each = [set(update.missing) for update in trace.together(step)]
        if partial := sorted(each[0].union(*each) - each[0].intersection(*each)):
            lacking = [rank for rank, names in enumerate(each) if partial[0] in names]
            yield AuditFinding(
                rule="gradient-missing", severity="fault", where=trace.together(step)[0].where,
                what=f"{plural(len(partial), 'parameter')} got a gradient on some ranks only, in update {step}",
                evidence=f"{few(partial, 3)}: none on rank {few(lacking)}",
                remedy="let every rank use every parameter, or DataParallel(model, find_unused_parameters=True); with "
                "gradients accumulated over micro-batches that looks at the last of them only",
            )  # fmt: skip
            return
