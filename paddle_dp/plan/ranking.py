"""Ranks the layouts of a number of cards by foretold seconds, and says which are tied, fit, or cannot be foretold.

Published runs judge data, tensor and pipeline axes and sharding of stage 1. No such run has sharding of stage 2 or a
sequence axis like this package's, and runs with stage 3 took several times their forecast: such layouts have no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paddle_dp.plan.candidates import Candidate, Numerics, candidates, workload_of
from paddle_dp.plan.devices import Device
from paddle_dp.plan.error_bars import BARS, STAGE3, TIE, BarClass, bar_class
from paddle_dp.plan.fullest_rank import TIGHT, USABLE_MEMORY, FullestRank, RankBytes
from paddle_dp.plan.kernel_time import SHEET, Rates
from paddle_dp.plan.layout import Blocks
from paddle_dp.plan.legal import Shape
from paddle_dp.plan.step_time import StepTime, step_time
from paddle_dp.plan.traced_model import TracedModel, traced_step_time
from paddle_dp.plan.transformer import Transformer
from paddle_dp.plan.workload import Numbers

SHOWN, UNFORETOLD = 12, 4  # layouts of a table, and of those without a rank


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """A layout that fits: `seconds` of a step between `low` and `high`, the fullest rank's bytes, its share of the
    device's peak, and the shares of the step's time by `step_time.SHARES`.

    `rank`: 1 for the first and all that are tied with it, and so on; 0: it is not foretold, and `low` is its
    least time. `tight`: it may not fit.
    """

    choice: Candidate
    seconds: float
    low: float
    high: float
    memory: RankBytes
    peak_share: float
    shares: dict[str, float]
    rank: int
    tight: bool


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A kind of layout of which none fits: the one with the fewest bytes."""

    choice: Candidate
    memory: RankBytes


@dataclass(frozen=True, kw_only=True)
class LayoutRanking:
    """The layouts of `ranks` cards: `legal` of them are there; `ranked` and `unforetold`, the best of each family;
    `chosen`: the plainest of the first rank that is not tight (of those that are not foretold, if no other fits);
    `current`: the recipe's own, if it runs on so many."""

    ranks: int
    legal: int = 0
    ranked: tuple[PlannedLayout, ...] = ()
    unforetold: tuple[PlannedLayout, ...] = ()
    misfits: tuple[Misfit, ...] = ()
    chosen: PlannedLayout | None = None
    current: PlannedLayout | Misfit | None = None

    def with_chosen(self) -> list[PlannedLayout]:
        """The ranked layouts, and among them the chosen one, which need not be its family's fastest."""
        rows, chosen = [*self.ranked], self.chosen
        if chosen is not None and chosen.rank and chosen.choice not in [row.choice for row in rows]:
            rows.insert(sum(row.seconds <= chosen.seconds for row in rows), chosen)
        return rows


@dataclass(frozen=True, kw_only=True)
class Planner:
    """A model, its batch and a device, for which layouts are ranked. `tied`: embedding and head share a weight.
    `elementwise`: the optimizer computes element by element, so that tensors may be cut. `rates`: the
    constants of the forecast; a measured device has its own. A model that was traced has neither tensor nor sequence
    axes and, if it has BatchNorms, as many micro-batches as `shape` says: each has other statistics."""

    model: Transformer | TracedModel
    blocks: Blocks
    shape: Shape
    device: Device
    numerics: Numerics
    tied: bool = False
    elementwise: bool = True
    rates: Rates = SHEET

    @property
    def bars(self) -> BarClass:
        """The class of published runs that judges the forecasts."""
        if isinstance(self.model, TracedModel):
            return "traced"
        return bar_class(self.device.family if self.numerics.low else "", self.model.width)

    def has_layout(self, ranks: int) -> bool:
        """Whether any layout of so many cards is legal."""
        return any(self._candidates(ranks))

    def _candidates(self, ranks: int) -> Iterator[Candidate]:
        settings = (self.shape, ranks, self.numerics.flash, self.tied, self.elementwise)
        if not isinstance(self.model, TracedModel):
            yield from candidates(*settings)
            return
        for choice in candidates(*settings, most_samples=self.shape.batch):
            one_axis = choice.degrees.tensor == choice.degrees.sequence == 1
            same_statistics = not self.model.has_norms or choice.micro_batches == self.shape.micro_batches
            if one_axis and same_statistics:
                yield choice

    def local_norm_seconds(self, choice: Candidate) -> float | None:
        """Seconds of this layout's step with BatchNorms of each rank alone; None if they are, or if there are none."""
        model, is_sync = self.model, self.numerics.sync_norms and choice.degrees.dp_size > 1
        if not (isinstance(model, TracedModel) and model.has_norms and is_sync):
            return None
        numerics = replace(self.numerics, sync_norms=False)
        return float(traced_step_time(model, [choice], self.device, numerics, self.rates).seconds[0])

    def ranking(self, ranks: int, current: Candidate | None = None) -> LayoutRanking:
        """Ranks every legal layout of so many cards; `current`: the recipe's own."""
        choices = [*self._candidates(ranks)]
        if current is not None and current not in choices:
            choices.append(current)
        if not choices:
            return LayoutRanking(ranks=ranks)
        search = LayoutSearch(self, choices)
        ranked, unforetold = tuple(search.best(judged=True)), tuple(search.best(judged=False))
        leaders = ranked or unforetold
        return LayoutRanking(
            ranks=ranks, legal=len(choices), ranked=ranked, unforetold=unforetold, misfits=tuple(search.misfits()),
            chosen=search.plainest(leaders[0]) if leaders else None,
            current=None if current is None else search.fitted_or_not(choices.index(current)),
        )  # fmt: skip


def is_foretold(choice: Candidate) -> bool:
    """Whether published runs judge layouts like this one."""
    return choice.stage < 2 and choice.degrees.sequence == 1


class LayoutSearch:
    """The layouts of one number of cards with their forecasts; the bytes of one are computed when asked for."""

    def __init__(self, planner: Planner, choices: Sequence[Candidate]) -> None:
        self.planner, self.choices = planner, choices
        self.step, self.flops = _step_time(planner, choices)
        self.seconds = self.step.seconds
        self.fullest = FullestRank(planner.blocks, planner.model, planner.numerics)
        self.free = USABLE_MEMORY * planner.device.memory

    def fits(self, index: int) -> bool:
        choice = self.choices[index]
        return self.fullest.least(choice) <= self.free and self.fullest.bytes_of(choice).total <= self.free

    def order(self, judged: bool) -> list[int]:
        """The indices of the layouts that published runs judge (`is_foretold`), or of the others: fastest first, of
        equal ones the plainest."""
        indices = [i for i, choice in enumerate(self.choices) if is_foretold(choice) == judged]
        return sorted(indices, key=lambda i: (round(float(self.seconds[i]), 6), self.choices[i].complexity))

    def best(self, judged: bool) -> list[PlannedLayout]:
        """The fastest layout of each family that fits, up to `SHOWN` of them, in ranks; `UNFORETOLD` without a rank."""
        planned: list[PlannedLayout] = []
        families: set[tuple[int, ...]] = set()
        rank, leader = 0, 0.0
        for i in self.order(judged):
            if self.choices[i].family in families or not self.fits(i):
                continue
            families.add(self.choices[i].family)
            if judged and self.seconds[i] > TIE * leader:
                rank, leader = rank + 1, float(self.seconds[i])
            planned.append(self.planned(i, rank))
            if len(planned) == (SHOWN if judged else UNFORETOLD):
                break
        return planned

    def plainest(self, leader: PlannedLayout) -> PlannedLayout:
        """Of the layouts that fit and are tied with the leader, the plainest that is not tight, if there is one; of
        equally plain ones the fastest."""
        tied = [i for i in self.order(leader.rank > 0) if self.seconds[i] <= TIE * leader.seconds]
        tied.sort(key=lambda i: self.choices[i].complexity)  # stable: the fastest stay first
        fitting = [i for i in tied if self.fits(i)]
        return self.planned(next((i for i in fitting if not self.is_tight(i)), fitting[0]), leader.rank)

    def is_tight(self, index: int) -> bool:
        """Whether the layout would not fit if it took `TIGHT` times its bytes."""
        return self.fullest.bytes_of(self.choices[index]).total * TIGHT > self.free

    def planned(self, index: int, rank: int) -> PlannedLayout:
        """The layout at this index as a row of the table."""
        choice, seconds = self.choices[index], float(self.seconds[index])
        bar = BARS[self.planner.bars]
        published = choice.stage == 3 and choice.degrees.sequence == 1
        low, high = (1 / bar, bar) if rank else STAGE3 if published else (1.0, float("inf"))
        cards, device = choice.degrees.ranks, self.planner.device
        peak = device.peak16 if self.planner.numerics.low else device.peak32
        return PlannedLayout(
            choice=choice, seconds=seconds, low=low * seconds, high=high * seconds,
            memory=self.fullest.bytes_of(choice), peak_share=float(self.flops[index] / (cards * peak * seconds)),
            shares=self.step.shares(index), rank=rank, tight=self.is_tight(index),
        )  # fmt: skip

    def fitted_or_not(self, index: int) -> PlannedLayout | Misfit:
        """The layout at this index: of rank 1 if it is foretold and fits, of rank 0 if it only fits."""
        if self.fits(index):
            return self.planned(index, int(is_foretold(self.choices[index])))
        return self._misfit(index)

    def _misfit(self, index: int) -> Misfit:
        return Misfit(choice=self.choices[index], memory=self.fullest.bytes_of(self.choices[index]))

    def misfits(self) -> Iterator[Misfit]:
        """Of each plain kind of layout, if none of it fits, the one with the fewest bytes."""
        for kind in _plain_kinds():
            indices = [i for i, choice in enumerate(self.choices) if kind(choice)]
            if indices and not any(self.fits(i) for i in indices):
                misfits = map(self._misfit, indices)
                yield min(misfits, key=lambda misfit: (misfit.memory.total, misfit.choice.complexity))


def _step_time(planner: Planner, choices: Sequence[Candidate]) -> tuple[StepTime, Numbers]:
    """The forecast of each layout, and the FLOPs of a step on all ranks."""
    model, device, numerics = planner.model, planner.device, planner.numerics
    if isinstance(model, TracedModel):
        step = traced_step_time(model, choices, device, numerics, planner.rates)
        return step, np.full(len(choices), model.flops * planner.shape.batch)
    load = workload_of(model, choices, device, numerics)
    return step_time(load, planner.rates), load.flops


def _plain_kinds() -> Iterator[Callable[[Candidate], bool]]:
    """Layouts along one axis, and sharding of each stage."""
    yield lambda choice: choice.axes in ((), ("data",))
    for stage in (1, 2, 3):
        yield lambda choice, stage=stage: choice.axes == ("sharding",) and choice.stage == stage  # type: ignore[misc]
    for axis in ("pipeline", "tensor"):
        yield lambda choice, axis=axis: choice.axes in ((axis,), ("data", axis))  # type: ignore[misc]
