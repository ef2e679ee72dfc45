"""The screen of a plan: a table of one number of cards, or a line for each of several, and how far to trust them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from textwrap import wrap

from paddle_dp.plan.candidates import Candidate
from paddle_dp.plan.error_bars import BARS, NARROW, RUNS, STAGE3, TIE
from paddle_dp.plan.fullest_rank import TIGHT, USABLE_MEMORY
from paddle_dp.plan.layout import total_parameters
from paddle_dp.plan.ranking import LayoutRanking, Misfit, PlannedLayout
from paddle_dp.plan.traced_model import TracedModel
from paddle_dp.plan.transformer import Transformer
from paddle_dp.text import amount, digits, duration, plural
from paddle_dp.verbs.layout_plan import RecipePlan

_HOUR = 3600.0  # seconds
_WIDTH = 100
_TIGHT = f"! tight: a measured peak was {TIGHT:g} times such arithmetic, which would not fit"
_HEAD = "rank  data shard pipe tensor batches recompute    8 of 10 within       memory  of peak"


class PlanScreen:
    """The lines of one plan, of 100 columns."""

    def __init__(self, plan: RecipePlan) -> None:
        self.planner, self.rankings, self.price = plan.planner, plan.rankings, plan.price
        self.recipe, self.reasons, self.lacking = plan.recipe, plan.reasons, plan.lacking

    def lines(self) -> Iterator[str]:
        """Yields the screen's lines, of 100 columns: a table for one number of cards, a line for each of several."""
        yield from _wrapped(self.title())
        yield from _wrapped(self.network())
        yield from _wrapped(self.lacking)
        yield ""
        yield from self._curve() if len(self.rankings) > 1 else self._table(self.rankings[0])
        yield ""
        for line in self._trust():
            yield from _wrapped(line)

    def title(self) -> str:
        """The model, its batch and the cards, as one line."""
        train, planner, first = self.recipe.train, self.planner, self.rankings[0]
        is_curve = len(self.rankings) > 1
        model = planner.model
        sample = f"{model.length} tokens" if isinstance(model, Transformer) else model.inputs
        noun = "card" if planner.device.accelerator else "rank"
        cards = f"{noun}s" if is_curve else plural(first.ranks, noun)
        cards += "" if planner.device.accelerator else " of"
        axes = "" if isinstance(model, Transformer) else " along data, sharding and pipeline"
        legal = "" if is_curve else f": {plural(first.legal, 'legal layout')}{axes}"
        return (
            f"{self.recipe.model.name} of {total_parameters(planner.blocks):,} parameters, batches of {train.batch} × "
            f"{sample}, {train.precision.dtype}, on {cards} {planner.device.name}{legal}"
        )

    def network(self) -> str:
        """The nodes that are assumed, as one line; empty if all cards are in one."""
        device = self.planner.device
        if max(ranking.ranks for ranking in self.rankings) <= device.node:
            return ""
        rate = f"{digits(8e-9 * device.node_link)} Gbit/s"
        return f"{plural(device.node, 'card')} in a node, {rate} from node to node (--node, --link)"

    def _table(self, ranking: LayoutRanking) -> Iterator[str]:
        """Yields the best layout of each family, then the consequences of the chosen one, and those without a rank."""
        chosen = ranking.chosen
        if chosen is None:
            none = f"none of the {ranking.legal} legal layouts fits: take more cards, or a device with more memory"
            for line in (none, *self._unranked(ranking)):
                yield from _wrapped(line)
            return
        rows = ranking.with_chosen()
        ties = [row.rank for row in rows]
        if rows:
            yield f"{'':27s}micro-                 a step,"
            yield _HEAD
        for row in rows:
            yield _row(row, row.choice == chosen.choice, ties.count(row.rank) > 1)
        yield ""
        for line in (*self._conclusions(ranking, chosen), *self._unranked(ranking)):
            yield from _wrapped(line)

    @property
    def _no_hours(self) -> str:
        asked = "no hours" + (", so no price" if self.price else "")
        return (
            f"{asked}: they need a length in steps, and this is {self.recipe.train.length}: add "
            "train.length='N steps', N being epochs × samples / train.batch"
        )

    @property
    def _steps_alone(self) -> str:
        bare = "of steps alone, without evaluation, checkpoints and failures"
        if not (isinstance(self.planner.model, Transformer) and self.planner.device.accelerator):
            return bare
        return f"{bare}: LLaMA took up to 39 % more card-hours on A100 than planned (docs/plan.md)"

    def _conclusions(self, ranking: LayoutRanking, chosen: PlannedLayout) -> Iterator[str]:
        among = f"rank 1{'' if chosen.tight else ' that is not tight'}"
        among = among if chosen.rank else "those that fit, not foretold, at least"
        size = amount(chosen.memory.total)
        yield f"→ the plainest of {among}: {described(chosen.choice)}: {duration(chosen.seconds)}, {size}"
        yield f"  its time: {_shares(chosen.shares)}"
        alone = self.planner.local_norm_seconds(chosen.choice)
        if alone is not None:
            yield (
                f"  {duration(alone)} with strategy.sync_batch_norm=false: BatchNorms of each rank's samples alone, "
                "which is not one process's training"
            )
        steps = self._steps()
        if steps is None:
            yield f"  {self._no_hours}"
        else:
            hours = self._hours(chosen, steps)
            cards = [ranking.ranks * each for each in hours]
            price = f", price {_between(*(each * self.price for each in cards))}" if self.price else ""
            model = self.planner.model
            each, noun = (model.length, "tokens") if isinstance(model, Transformer) else (1, "samples")
            read = self._full_batches(steps) * self.recipe.train.batch * each
            yield (
                f"  {steps:,} steps, {read:.3g} {noun}: {_between(*hours)} hours{_days(*hours)}, {_between(*cards)} "
                f"card-hours{price}"
            )
            yield f"  {self._steps_alone}"
        current = ranking.current
        if isinstance(current, Misfit):
            yield f"  the recipe as it is does not fit: {self._excess(current)}"
        elif current is not None:
            bar = f"({bar_text(current)})" if current.rank else "at least, not foretold"
            size = amount(current.memory.total)
            yield f"  the recipe as it is: {duration(current.seconds)} {bar}, {size}: {described(current.choice)}"
        else:
            yield f"  the recipe as it is cannot run on so many: {self.reasons[ranking.ranks]}"
        if any(row.tight for row in (*ranking.ranked, chosen)):
            yield f"  {_TIGHT}"

    def _unranked(self, ranking: LayoutRanking) -> Iterator[str]:
        if ranking.unforetold:
            yield (
                f"not foretold: of stage 3, 8 of 10 published runs took {STAGE3[0]:g} to {STAGE3[1]:g} times the "
                "arithmetic, which is the span below; no run is like the others"
            )
        for row in ranking.unforetold:
            seconds = span_text(row) if isfinite(row.high) else f"{duration(row.low)} at least"
            yield f"  {seconds}: {described(row.choice)}, {amount(row.memory.total)}"
        for misfit in ranking.misfits:
            yield f"does not fit: {self._excess(misfit)}"

    def _excess(self, misfit: Misfit) -> str:
        memory = misfit.memory
        return (
            f"{misfit.choice}: {amount(memory.total)} at least, {amount(memory.state)} of it weights, gradients and "
            f"optimizer; a card has {amount(USABLE_MEMORY * self.planner.device.memory)} for them"
        )

    def _steps(self) -> int | None:
        """The length in steps; None if it is in epochs, whose steps only the data knows."""
        length = self.recipe.train.length
        return int(length.count) if length.unit == "steps" else None

    def _full_batches(self, steps: int) -> float:
        """How many times `train.batch` so many steps read: fewer than steps while the batch grows."""
        train, ramp = self.recipe.train, self.recipe.train.batch_ramp
        if ramp is None:
            return steps
        growing = min(steps, int(ramp.every.count) * -(-(train.batch - ramp.start) // ramp.increment))
        samples = sum(ramp.size(update, train.batch) for update in range(growing))
        return samples / train.batch + steps - growing

    def _hours(self, row: PlannedLayout, steps: int) -> tuple[float, float]:
        """The least and the most hours. A smaller batch takes no more than a whole one, and its share at least."""
        return row.low * self._full_batches(steps) / _HOUR, row.high * steps / _HOUR

    def _curve(self) -> Iterator[str]:
        """Yields a line for each number of cards: the chosen layout's."""
        steps = self._steps()
        names = ["hours", "card-hours", *(["price"] if self.price else [])] if steps else []
        rows = [["cards", "a step", "8 of 10 within", "eff.", *names, "  layout"]]
        first: tuple[int, float] | None = None
        is_tight, most = False, 0.0
        for ranking in self.rankings:
            chosen = ranking.chosen
            if chosen is None:
                why = f"none of {ranking.legal} layouts fits" if ranking.legal else "no legal layout"
                rows.append([str(ranking.ranks), *[""] * (len(rows[0]) - 2), f"  {why}"])
                continue
            first = first or (ranking.ranks, chosen.seconds)
            efficiency = first[0] * first[1] / ranking.ranks / chosen.seconds
            hours = self._hours(chosen, steps or 0)
            cards = [ranking.ranks * each for each in hours]
            costs = [_between(*each) for each in (hours, cards, [each * (self.price or 0) for each in cards])]
            mark = ("!" if chosen.tight else "") + ("" if chosen.rank else ", not foretold: at least")
            is_tight, most = is_tight or chosen.tight, max(most, efficiency)
            cells = [str(ranking.ranks), duration(chosen.seconds), bar_text(chosen), f"{efficiency:.0%}"]
            rows.append([*cells, *costs[: len(names)], f"  {chosen.choice}{mark}"])
        yield from aligned(rows)
        if first is not None:
            yield ""
            lines = [self._no_hours if steps is None else f"hours: {self._steps_alone}"]
            more = " More than 100 %: more cards have room for a faster layout." if most > 1.005 else ""
            lines.append(
                f"eff.: samples a second of one card, of those with {plural(first[0], 'card')}.{more} --ranks N shows "
                "all layouts of one number."
            )
            lines += [_TIGHT] if is_tight else []
            for line in lines:
                yield from _wrapped(line)

    def _trust(self) -> Iterator[str]:
        bars, micro_batches = self.planner.bars, self.planner.shape.micro_batches
        if isinstance(self.planner.model, TracedModel) and self.planner.model.has_norms:
            yield (
                f"each layout has {plural(micro_batches, 'micro-batch', 'micro-batches')}, as the recipe: BatchNorm "
                "takes the statistics of each, so another number is another training."
            )
        narrow = f" (up to {NARROW} wide)" if bars == "narrow" else ""
        software = "are of other software, with fused kernels"
        software = "do not have this package's BatchNorm over all ranks" if bars == "traced" else software
        yield (
            f"8 of 10 runs took at most {100 * (BARS[bars] - 1):.0f} % more than foretold, or that much less: "
            f"{RUNS[bars]}{narrow}. They {software} (docs/plan.md)."
        )
        yield (
            f"= cannot be told apart: within {100 * (TIE - 1):.0f} %, more than 2 of 10 pairs of published runs were "
            "the other way round."
        )


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table: all cells but a row's last are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *cells, last in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=False)) + last


def _row(row: PlannedLayout, is_chosen: bool, is_tied: bool) -> str:
    degrees, choice = row.choice.degrees, row.choice
    pipeline = f"{degrees.pipeline}" + (f"·{choice.virtual_stages}" if choice.virtual_stages > 1 else "")
    rank = f"{row.rank}{'=' if is_tied else ' '}{'→' if is_chosen else ' '}"
    seconds = f"{duration(row.seconds)} ({bar_text(row)})"
    batches = f"{choice.micro_batches}×{choice.micro}"
    recompute = str(choice.recompute).removesuffix(" blocks")
    size = f"{amount(row.memory.total)}{'!' if row.tight else ' '}"
    return (
        f"{rank:>4s} {degrees.data:5d} {degrees.sharding:5d} {pipeline:>4s} {degrees.tensor:6d} {batches:>7s} "
        f"{recompute:10s} {seconds:>23s} {size:>9s} {row.peak_share:6.0%}"
    )


def described(choice: Candidate) -> str:
    """ "data 8 × tensor 2, 4 micro-batches of 2, recompute none"."""
    batches = plural(choice.micro_batches, "micro-batch", "micro-batches")
    return f"{choice}, {batches} of {choice.micro}, recompute {choice.recompute}"


def bar_text(row: PlannedLayout) -> str:
    """ "12.8 … 15.2", in the unit of the row's seconds."""
    times = 1.0 if row.seconds >= 1 else 1e3
    high = digits(times * row.high) if isfinite(row.high) else "?"
    return f"{digits(times * row.low)} … {high}"


def span_text(row: PlannedLayout) -> str:
    """ "12.8 … 15.2 s"."""
    return f"{bar_text(row)} {'s' if row.seconds >= 1 else 'ms'}"


def _between(low: float, high: float) -> str:
    """ "1,020 to 1,210", of three digits, or "1,020 at least"."""
    first, last = (f"{float(f'{each:.3g}'):,.0f}" if each >= 100 else digits(each) for each in (low, high))
    return f"{first} to {last}" if isfinite(high) else f"{first} at least"


def _days(low: float, high: float) -> str:
    """ " (40 to 48 days)"; empty below four days, or without a limit."""
    return f" ({low / 24:,.0f} to {high / 24:,.0f} days)" if low >= 96 and isfinite(high) else ""


def _shares(shares: dict[str, float]) -> str:
    shown = sorted(((share, name) for name, share in shares.items() if share >= 0.005), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in shown)


def _wrapped(line: str) -> list[str]:
    """The line in pieces of at most 100 columns, those after the first further in."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return wrap(line, _WIDTH, subsequent_indent=indent, drop_whitespace=True, replace_whitespace=False)
