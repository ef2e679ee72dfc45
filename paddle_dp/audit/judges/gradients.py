"""Judges gradients: compares the optimizer's gradient on N ranks with one process's from the same samples.

Per update, with equal weights on all ranks: g_r is rank r's local gradient before any exchange, f_r its optimizer's
gradient, u the gradient of the same script on one process, from all ranks' joined batches (hooks/replay.py). With R
ranks and n_r samples each, m = mean of g_r, and w = sum of n_r g_r / sum of n_r. u decides whether f is right; if not,
local gradients give the reason: f_r = g_r (not exchanged), f = R m (summed), f = m / R (averaged twice), f = m but
u = w (mean of means).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from paddle_dp.audit.finding import AuditFinding, ReportSection
from paddle_dp.audit.records import Arrays, EventTrace
from paddle_dp.text import few, plural

EXACT_DISTANCE = 3e-4  # relative, of two float32 gradients of the same samples, that only rounding explains
ROUNDED_DISTANCE = 2e-2  # the same, for low precision: allowed only where the exchange itself is exact
ALIGNED_COSINE = 0.999  # cosine from which two gradients count as one direction
DIVIDE = "divide by the number of ranks after all_reduce"
DIVIDE_ONCE = "divide by the number of ranks once: DataParallel does so already"


@dataclass(frozen=True)
class Update:
    """One recorded update: `local` and `final` are each rank's g_r and f_r, `sizes` are n_r, `reference` is u if known.

    `equal`: all ranks held the same weights; if not, only the exchange can be judged.
    """

    step: int
    source_line: str
    local: tuple[Arrays, ...]
    final: tuple[Arrays, ...]
    sizes: tuple[int, ...]
    drew: bool
    reference: Arrays | None = None
    equal: bool = True

    @property
    def ranks(self) -> int:
        return len(self.local)

    @property
    def names(self) -> list[str]:
        """The parameters that all sides have, without all-zero ones."""
        sides = [*self.local, *self.final, *([self.reference] if self.reference is not None else [])]
        common = set.intersection(*(set(side) for side in sides))
        return [n for n in self.final[0] if n in common and any(np.any(side[n]) for side in sides)]

    def mean(self, name: str) -> np.ndarray:
        return np.asarray(np.mean([local[name] for local in self.local], axis=0, dtype=np.float64))

    def weighted(self, name: str) -> np.ndarray:
        if not sum(self.sizes):
            return self.mean(name)
        shares = np.array(self.sizes, np.float64) / sum(self.sizes)
        return np.tensordot(shares, [local[name].astype(np.float64) for local in self.local], axes=1)


def recorded_updates(trace: EventTrace, alone: EventTrace | None = None) -> Iterator[Update]:
    """The updates with gradients recorded on all ranks."""
    for step in range(1, trace.steps + 1):
        updates = trace.together(step)
        if not all(update.arrays for update in updates) or len({update.optimizer for update in updates}) > 1:
            continue
        files = [rank.arrays(update.arrays) for rank, update in zip(trace.ranks, updates, strict=True)]
        scale = updates[0].scale
        yield Update(
            step=step, source_line=updates[0].where,
            local=tuple({k[4:]: v / scale for k, v in file.items() if k.startswith("own/")} for file in files),
            final=tuple({k[6:]: v for k, v in file.items() if k.startswith("final/")} for file in files),
            sizes=tuple(sum(rank.sizes(u)) for rank, u in zip(trace.ranks, updates, strict=True)),
            drew=any(update.drew for update in updates), equal=step <= trace.equal_until,
            reference=alone.ranks[0].arrays(f"replay.step-{step}") or None if alone is not None else None,
        )  # fmt: skip


def gradients(updates: list[Update], local_norms: bool, why_not: str) -> ReportSection:
    """Judges each recorded update; `why_not`: the reason why one process did not run, "" if it did."""
    if not updates:
        return ReportSection("gradients", "no update was recorded", ())
    findings: dict[str, AuditFinding] = {}
    for update in updates:
        for finding in judge(update, local_norms):
            findings.setdefault(finding.rule, finding)
    steps = few([update.step for update in updates])
    coverage = f"{plural(len(updates[0].names), 'parameter')} in update{'s' * (len(updates) > 1)} {steps}: "
    coverage += f"each rank's own against the optimizer's, {_against(updates, local_norms, why_not)}"
    return ReportSection("gradients", coverage, tuple(findings.values()))


def _against(updates: list[Update], local_norms: bool, why_not: str) -> str:
    if why_not:
        return f"and not against one process's ({why_not})"
    relative_error = max(distance(update) or 0.0 for update in updates)
    drew = any(update.drew for update in updates)
    reasons = ["local BatchNorm"] * local_norms + ["other random masks"] * drew
    why = f", with {' and '.join(reasons)}" if reasons else ""
    return f"and that against one process's on the same samples: {relative_error:.1e} apart at most{why}"


def judge(update: Update, local_norms: bool = False) -> Iterator[AuditFinding]:
    """Findings on one update's gradient; none if it is one process's up to rounding."""
    if not update.names:
        return
    alone = [name for name in update.names if kind_of(update, name) == "own"]
    if alone and update.ranks > 1:
        yield _not_exchanged(update, alone)
        return
    if not update.equal:
        return
    if update.ranks > 1 and not any(update.sizes) and _same_batch(update):
        yield AuditFinding(
            rule="samples-not-shared", severity="fault", where=update.source_line,
            what="all ranks compute the same gradient: they read the same batch",
            evidence=f"update {update.step}: the ranks' own gradients are equal bit for bit "
            f"in all of {plural(len(update.names), 'parameter')}",
            remedy="let rank r of R read every R-th sample, from the r-th on",
        )  # fmt: skip
    exact = not (local_norms or update.drew)
    if update.reference is None:
        # Only notes: a script may weight its losses so that this is right, which only one process would show.
        for finding in _judge_local(update):
            problem = f"if a rank's loss is the mean over its samples, {finding.what}"
            yield replace(finding, severity="note", what=problem)
    elif not _is_right(update, exact):
        yield _explained(update, exact)


def _same_batch(update: Update) -> bool:
    first = update.local[0]
    return all(np.array_equal(local[name], first[name]) for local in update.local for name in update.names)


def kind_of(update: Update, name: str) -> str:
    """The relation of a parameter's final gradients to the local ones: "mean", "own", "scaled" or "other"."""
    mean = update.mean(name)
    if all(close(final[name], mean) for final in update.final):
        return "mean"
    if all(close(f[name], local[name]) for f, local in zip(update.final, update.local, strict=True)):
        return "own"
    factor = ratio(update.final[0][name], mean)
    if factor and all(close(final[name], factor * mean) for final in update.final):
        return "scaled"
    return "other"


def close(a: np.ndarray, b: np.ndarray, allowed: float = EXACT_DISTANCE) -> bool:
    return float(np.linalg.norm(a - b)) <= allowed * max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))


def relative_distance(a: np.ndarray, b: np.ndarray) -> float:
    """|a − b| / |b|."""
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-300)


def ratio(a: np.ndarray, b: np.ndarray) -> float:
    """The factor c with which c b is nearest to a."""
    return float(np.vdot(a, b)) / max(float(np.vdot(b, b)), 1e-300)


def vector(update: Update, which: str) -> np.ndarray:
    """The gradients of all parameters as one vector: "final" (of rank 0), "one", "mean" or "weighted"."""
    sides: dict[str, Callable[[str], np.ndarray]] = {
        "final": update.final[0].__getitem__, "mean": update.mean, "weighted": update.weighted,
        "one": (update.reference or {}).__getitem__,
    }  # fmt: skip
    return np.concatenate([np.asarray(sides[which](name), np.float64) for name in update.names])


def distance(update: Update) -> float | None:
    """|f − u| / |u| over all parameters, the largest of all ranks; None without u."""
    if update.reference is None or not update.names:
        return None
    reference = vector(update, "one")
    finals = [np.concatenate([final[name] for name in update.names]) for final in update.final]
    return max(relative_distance(final, reference) for final in finals)


def _is_right(update: Update, exact: bool) -> bool:
    relative_error, final, reference = distance(update) or 0.0, vector(update, "final"), vector(update, "one")
    if not exact:  # other masks, or other normalisation: only the size can be judged
        return all(kind_of(update, n) == "mean" for n in update.names) or 0.7 < ratio(final, reference) < 1.4
    is_exchange_exact = close(final, vector(update, "weighted"))
    return relative_error <= (ROUNDED_DISTANCE if is_exchange_exact else EXACT_DISTANCE)


def _not_exchanged(update: Update, alone: list[str]) -> AuditFinding:
    everything = len(alone) == len(update.names)
    pairs = ((local[name], update.local[0][name]) for name in alone for local in update.local)
    spread = max(relative_distance(*pair) for pair in pairs)
    return AuditFinding(
        rule="not-exchanged", severity="fault", where=update.source_line,
        what="no gradient is exchanged: each rank follows its own" if everything
        else f"{len(alone)} of {plural(len(update.names), 'gradient')} not exchanged",
        evidence=f"update {update.step}: the optimizer got the rank's own gradient in {few(alone, 4)}; "
        f"the ranks' own are up to {spread:.0%} apart",
        remedy="put paddle.DataParallel around the whole model and call the wrapper, "
        "or all_reduce every gradient and divide by the number of ranks",
    )  # fmt: skip


def _judge_local(update: Update) -> Iterator[AuditFinding]:
    """Findings from local gradients alone, if each loss is the mean over its samples."""
    mean, final, ranks = vector(update, "mean"), vector(update, "final"), update.ranks
    factor = ratio(final, mean)
    for size, problem, remedy in (
        (float(ranks), "summed, and not averaged", DIVIDE),
        (1 / ranks, "averaged twice", DIVIDE_ONCE),
    ):
        if ranks > 1 and abs(factor / size - 1) < 0.01:
            numbers = f"update {update.step}: {factor:.3f} times the mean of the ranks' own gradients"
            yield _wrong_scale(update, f"the gradients are {problem}", numbers, remedy)
    weighted = vector(update, "weighted")
    if len(set(update.sizes)) > 1 and not close(final, weighted) and close(final, mean):
        yield _mean_of_means(update, relative_distance(weighted, final))


def _mean_of_means(update: Update, relative_error: float) -> AuditFinding:
    shares = " and ".join(map(str, update.sizes))
    return AuditFinding(
        rule="mean-of-means", severity="fault", where=update.source_line,
        what=f"the gradient is a mean of means over unequal shares ({shares} samples): {relative_error:.1%} off",
        evidence=f"update {update.step}: the optimizer got the plain mean of the ranks' gradients, "
        f"{relative_error:.2%} away from one process's on the same {sum(update.sizes)} samples",
        remedy="multiply each rank's loss by its samples × ranks / samples of all ranks before backward()",
    )  # fmt: skip


def _explained(update: Update, exact: bool) -> AuditFinding:
    """The finding for a gradient that is not one process's, with the probable reason."""
    final, reference, mean = (vector(update, which) for which in ("final", "one", "mean"))
    ranks, norms = update.ranks, float(np.linalg.norm(final) * np.linalg.norm(reference))
    relative_error, factor = distance(update) or 0.0, ratio(final, reference)
    cosine = float(np.vdot(final, reference)) / max(norms, 1e-300)
    numbers = f"update {update.step}: {factor:.3f} × one process's gradient, cosine {cosine:.4f}"
    averaged = close(final, mean)
    unequal = len(set(update.sizes)) > 1
    # With unequal shares m and u always differ in direction a little; w is one process's gradient.
    if exact and averaged and unequal and close(vector(update, "weighted"), reference, ROUNDED_DISTANCE):
        return _mean_of_means(update, relative_error)

    def is_about(size: float) -> bool:
        """Whether f is `size` times u to 1 %; if directions may differ, `size` times m to 1 %, and times u roughly."""
        if exact and not unequal:
            return cosine > ALIGNED_COSINE and abs(factor / size - 1) < 0.01
        return (averaged or abs(ratio(final, mean) / size - 1) < 0.01) and 0.7 < factor / size < 1.4

    if is_about(ranks):
        problem = f"the gradients are summed, and not averaged: {ranks} × one process's"
        return _wrong_scale(update, problem, numbers, DIVIDE)
    if is_about(1 / ranks) and averaged:
        problem = (
            f"the loss is a sum over samples, and its gradients are averaged: 1/{ranks} of one process's"
        )
        remedy = "divide the loss by a number that does not depend on the ranks, and sum the gradients"
        return _wrong_scale(update, problem, numbers, remedy)
    if is_about(1 / ranks):
        problem = f"the gradients are averaged twice: 1/{ranks} of one process's"
        return _wrong_scale(update, problem, numbers, DIVIDE_ONCE)
    return AuditFinding(
        rule="other-gradient", severity="fault" if exact else "difference", where=update.source_line, evidence=numbers,
        what=f"the gradient is not one process's on the same samples: {relative_error:.1%} away",
        remedy="look for a computation over a rank's batch as a whole: a masked mean, a contrastive loss, a norm",
    )  # fmt: skip


def _wrong_scale(update: Update, problem: str, numbers: str, remedy: str) -> AuditFinding:
    return AuditFinding(
        rule="wrong-scale", severity="fault", where=update.source_line, what=problem, evidence=numbers, remedy=remedy,
    )  # fmt: skip
