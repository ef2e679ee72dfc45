"""Judges BatchNorm layers: with normalisation over one rank's samples, N ranks learn something else than one."""

from __future__ import annotations

import numpy as np

from paddle_dp.audit.events import BatchNormLayers, RunningMeans
from paddle_dp.audit.finding import AuditFinding, ReportSection
from paddle_dp.audit.records import EventTrace
from paddle_dp.text import few, plural


def norms(trace: EventTrace, relative_error: float | None) -> ReportSection:
    """Judges the layers; `relative_error`: the first gradient's relative distance from one process's, if known."""
    event = trace.ranks[0].first(BatchNormLayers)
    if event is None:
        return ReportSection("BatchNorm", "no update was done, so no layer was examined", ())
    local = len(event.layers)
    coverage = f"{plural(local + event.synchronised, 'layer')}, {event.synchronised} of them synchronised"
    if not local or len(trace.ranks) < 2:
        return ReportSection("BatchNorm", coverage, ())
    evidence = [few(event.layers, 2), _means(trace)]
    if relative_error is not None:
        off = f"{relative_error:.1%} away from one process's on the same samples"
        evidence.append(f"the first gradient is {off}")
    finding = AuditFinding(
        rule="batchnorm-local", severity="difference",
        what=f"{plural(local, 'BatchNorm layer')} normalise{'s' * (local == 1)} over one rank's samples only",
        evidence="; ".join(filter(None, evidence)), where=trace.together(1)[0].where if trace.steps else "",
        remedy="model = paddle.nn.SyncBatchNorm.convert_sync_batchnorm(model) before DataParallel; on a GPU",
    )  # fmt: skip
    return ReportSection("BatchNorm", coverage, (finding,))


def _means(trace: EventTrace) -> str:
    """A clause on the largest difference of the ranks' running means; "" if they are equal."""
    events = [rank.first(RunningMeans) for rank in trace.ranks]
    if any(each is None for each in events):
        return ""
    means = [each.means for each in events if each is not None]
    spread = {
        name: max(float(np.abs(np.subtract(each[name], means[0][name])).max()) for each in means)
        for name in means[0]
        if all(name in each for each in means)
    }
    if not spread or not (most := max(spread.values())):
        return ""
    name = max(spread, key=lambda key: spread[key])
    return f"running means differ by up to {most:.2g} between ranks (in {name}), and each rank saves its own"
