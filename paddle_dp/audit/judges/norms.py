"""Judges BatchNorm layers: those that normalise over one rank's samples make N ranks learn something else than one."""

from __future__ import annotations

import numpy as np

from paddle_dp.audit.events import Buffered, Normed
from paddle_dp.audit.finding import Finding, Section, few, plural
from paddle_dp.audit.records import Trace


def norms(trace: Trace, apart: float | None) -> Section:
    """`apart`: the relative distance of the first gradient from one process's, if known."""
    seen = next(iter(trace.ranks[0].of(Normed)), None)
    if seen is None:
        return Section("BatchNorm", "no update was done, so no layer was examined", ())
    local = len(seen.layers)
    looked = f"{plural(local + seen.synchronised, 'layer')}, {seen.synchronised} of them synchronised"
    if not local or len(trace.ranks) < 2:
        return Section("BatchNorm", looked, ())
    evidence = [f"{few(seen.layers, 2)}", _means(trace)]
    if apart is not None:
        evidence.append(f"the first gradient is {apart:.1%} away from one process's on the same samples")
    finding = Finding(
        rule="batchnorm-local", severity="difference",
        what=f"{plural(local, 'BatchNorm layer')} normalise{'s' * (local == 1)} over one rank's samples only",
        evidence="; ".join(filter(None, evidence)), where=trace.together(1)[0].where if trace.steps else "",
        remedy="model = paddle.nn.SyncBatchNorm.convert_sync_batchnorm(model) before DataParallel; on a GPU",
    )  # fmt: skip
    return Section("BatchNorm", looked, (finding,))


def _means(trace: Trace) -> str:
    """A sentence on how much the ranks' running means differ; "" if they do not."""
    kept = [next(iter(rank.of(Buffered)), None) for rank in trace.ranks]
    if any(each is None for each in kept):
        return ""
    means = [each.means for each in kept if each is not None]
    apart = {
        name: max(float(np.abs(np.subtract(each[name], means[0][name])).max()) for each in means)
        for name in means[0]
        if all(name in each for each in means)
    }
    if not apart or not (most := max(apart.values())):
        return ""
    name = max(apart, key=lambda key: apart[key])
    return f"running means differ by up to {most:.2g} between ranks (in {name}), and each rank saves its own"
