"""Plans a recipe for accelerators that are not here: its layouts on each number of cards, as lines or as one object.

No process starts and no sample is read. The model is built without memory for its weights, to read their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from textwrap import wrap
from typing import Any

from paddle_dp.axes.meta_init import describe_weights
from paddle_dp.errors import UsageError
from paddle_dp.part import adapted, lazily
from paddle_dp.plan import problems
from paddle_dp.plan.candidates import Candidate, Numerics
from paddle_dp.plan.devices import Device
from paddle_dp.plan.error_bars import BARS, NARROW, RUNS, STAGE3, TIE
from paddle_dp.plan.fullest_rank import FREE
from paddle_dp.plan.kernel_time import SHEET, Rates
from paddle_dp.plan.legal import Shape
from paddle_dp.plan.memory import STATES, Widths
from paddle_dp.plan.probe import Probe
from paddle_dp.plan.rank_memory import total_parameters
from paddle_dp.plan.ranking import LayoutRanking, Misfit, PlannedLayout, Planner
from paddle_dp.plan.transformer import transformer
from paddle_dp.recipe import Recipe, read_recipe
from paddle_dp.recipe.write import write_recipe
from paddle_dp.text import amount, digits, duration, plural
from paddle_dp.verbs.forecast import layout_of, masks_documents

MOST_RANKS = 4096
STRATEGIES = ("single", "data_parallel", "hybrid")  # whose steps a plan knows
_HOUR = 3600.0  # seconds
_WIDTH = 100
_HEAD = "rank  data shard pipe tensor batches recompute    8 of 10 within       memory  of peak"


def rank_numbers(text: str) -> list[int]:
    """ "1..64" → 1, 2, 4 … 64; "8,12" → 8, 12; "64" → 64. Raises UsageError for anything else."""
    numbers: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 0 < first <= last:
            raise UsageError(
                f"--ranks {text}: give a number of cards (64), numbers (8,12,16), or a range (1..64: 1, 2, 4 … 64)."
            )
        if last > MOST_RANKS:
            raise UsageError(f"--ranks {text}: layouts are planned for up to {MOST_RANKS} cards.")
        numbers += [first * 2**n for n in range(last.bit_length()) if first * 2**n < last] + [last]
    return sorted({*numbers})


@dataclass(frozen=True, kw_only=True)
class RecipePlan:
    """The rankings of a recipe's layouts, one for each number of cards; `price` of a card-hour, if it was given."""

    recipe: Recipe
    planner: Planner
    rankings: tuple[LayoutRanking, ...]
    price: float | None = None

    @classmethod
    def make(
        cls,
        file: Path,
        settings: Sequence[str],
        ranks: Sequence[int],
        device: Device,
        price: float | None = None,
        probe: Probe | None = None,
    ) -> RecipePlan:
        """Plans the recipe in the file for each of these numbers of cards; `probe`: the device was measured. Raises
        UsageError for a recipe that cannot be planned, with the reason."""
        recipe = read_recipe(file, settings)
        rates = (
            SHEET if probe is None else probe.checked_rates(device, recipe.train.precision.dtype, max(ranks))
        )
        planner = planner_of(recipe, hybrid(file, settings, recipe), device, rates)
        rankings = tuple(planner.ranking(n, current(recipe, planner.shape, n)) for n in ranks)
        return cls(recipe=recipe, planner=planner, rankings=rankings, price=price)

    def lines(self) -> Iterator[str]:
        """Yields the screen's lines, of 100 columns: a table for one number of cards, a line for each of several."""
        yield from _wrapped(self.title())
        yield ""
        yield from self._curve() if len(self.rankings) > 1 else self._table(self.rankings[0])
        yield ""
        for line in self._trust():
            yield from _wrapped(line)

    def as_fields(self) -> dict[str, Any]:
        """The plan as one JSON object; seconds without a limit are null."""
        bars = self.planner.bars
        return {
            "recipe": self.recipe.name,
            "parameters": total_parameters(self.planner.blocks),
            "model": asdict(self.planner.model),
            "batch": self.recipe.train.batch,
            "device": asdict(self.planner.device),
            "bar": {"class": bars, "ratio": BARS[bars], "runs": RUNS[bars], "tie": TIE, "stage3": STAGE3},
            "rankings": [self._ranking_fields(ranking) for ranking in self.rankings],
        }

    def title(self) -> str:
        """The model, its batch and the cards, as one line."""
        train, planner, first = self.recipe.train, self.planner, self.rankings[0]
        is_curve = len(self.rankings) > 1
        noun = "card" if planner.device.accelerator else "rank"
        cards = f"{noun}s" if is_curve else plural(first.ranks, noun)
        cards += "" if planner.device.accelerator else " of"
        legal = "" if is_curve else f": {plural(first.legal, 'legal layout')}"
        return (
            f"{self.recipe.model.name} of {total_parameters(planner.blocks):,} parameters, batches of {train.batch} × "
            f"{planner.model.length} tokens, {train.precision.dtype}, on {cards} {planner.device.name}{legal}"
        )

    def _table(self, ranking: LayoutRanking) -> Iterator[str]:
        """Yields the best layout of each family, then the consequences of the chosen one, and those without a rank."""
        chosen = ranking.chosen
        if chosen is None:
            for line in self._nothing(ranking):
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

    def _conclusions(self, ranking: LayoutRanking, chosen: PlannedLayout) -> Iterator[str]:
        plain = (
            "the plainest of rank 1"
            if chosen.rank
            else "the plainest of those that fit, not foretold, at least"
        )
        yield f"→ {plain}: {described(chosen.choice)}: {duration(chosen.seconds)}, {amount(chosen.memory.total)}"
        yield f"  its time: {_shares(chosen.shares)}"
        steps = self._steps()
        if steps is None:
            yield f"  no hours: they need a length in steps, and this is {self.recipe.train.length}"
        else:
            hours = _hours(chosen, steps)
            cards = [ranking.ranks * each for each in hours]
            price = f", price {_between(*(each * self.price for each in cards))}" if self.price else ""
            yield f"  {steps:,} steps: {_between(*hours)} hours, {_between(*cards)} card-hours{price}"
        current = ranking.current
        if isinstance(current, Misfit):
            yield f"  the recipe as it is does not fit: {self._excess(current)}"
        elif current is not None:
            bar = f"({bar_text(current)})" if current.rank else "at least, not foretold"
            size = amount(current.memory.total)
            yield f"  the recipe as it is: {duration(current.seconds)} {bar}, {size}: {described(current.choice)}"
        if any(row.tight for row in (*ranking.ranked, chosen)):
            yield "  ! tight: measured peaks were up to a third above such arithmetic"

    def _unranked(self, ranking: LayoutRanking) -> Iterator[str]:
        if ranking.unforetold:
            yield (
                f"not foretold: of stage 3, 8 of 10 published runs took {STAGE3[0]:g} to {STAGE3[1]:g} times the "
                "arithmetic, which is the span below; no run is like the others"
            )
        for row in ranking.unforetold:
            seconds = _span(row) if isfinite(row.high) else f"{duration(row.low)} at least"
            yield f"  {seconds}: {described(row.choice)}, {amount(row.memory.total)}"
        for misfit in ranking.misfits:
            yield f"does not fit: {self._excess(misfit)}"

    def _nothing(self, ranking: LayoutRanking) -> Iterator[str]:
        shape = self.planner.shape
        if not ranking.legal:
            yield (
                f"no layout of {plural(ranking.ranks, 'card')} divides the batch ({shape.batch}) and the model "
                f"(heads {shape.heads}): choose another number of cards, or another train.batch"
            )
            return
        yield f"none of the {ranking.legal} legal layouts fits: take more cards, or a device with more memory"
        yield from self._unranked(ranking)

    def _excess(self, misfit: Misfit) -> str:
        memory = misfit.memory
        return (
            f"{misfit.choice}: {amount(memory.total)} at least, {amount(memory.state)} of it weights, gradients and "
            f"optimizer; a card has {amount(FREE * self.planner.device.memory)} for them"
        )

    def _steps(self) -> int | None:
        """The length in steps; None if it is in epochs, whose steps only the data knows."""
        length = self.recipe.train.length
        return int(length.count) if length.unit == "steps" else None

    def _curve(self) -> Iterator[str]:
        """Yields a line for each number of cards: the chosen layout's."""
        steps = self._steps()
        names = ["hours", "card-hours", *(["price"] if self.price else [])] if steps else []
        rows = [["cards", "a step", "8 of 10 within", "eff.", *names, "  layout"]]
        first: tuple[int, float] | None = None
        for ranking in self.rankings:
            chosen = ranking.chosen
            if chosen is None:
                why = f"none of {ranking.legal} layouts fits" if ranking.legal else "no legal layout"
                rows.append([str(ranking.ranks), *[""] * (len(rows[0]) - 2), f"  {why}"])
                continue
            first = first or (ranking.ranks, chosen.seconds)
            efficiency = first[0] * first[1] / ranking.ranks / chosen.seconds
            hours = _hours(chosen, steps or 0)
            cards = [ranking.ranks * each for each in hours]
            costs = [_between(*each) for each in (hours, cards, [each * (self.price or 0) for each in cards])]
            mark = "" if chosen.rank else ", not foretold: at least"
            cells = [str(ranking.ranks), duration(chosen.seconds), bar_text(chosen), f"{efficiency:.0%}"]
            rows.append([*cells, *costs[: len(names)], f"  {chosen.choice}{mark}"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield (
                "  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)) + row[-1]
            )
        if first is not None:
            yield ""
            yield f"eff.: cards put to use, of {plural(first[0], 'card')}. --ranks N shows all layouts of one number."

    def _trust(self) -> Iterator[str]:
        bars = self.planner.bars
        narrow = f" (up to {NARROW} wide)" if bars == "narrow" else ""
        yield (
            f"8 of 10 runs took at most {100 * (BARS[bars] - 1):.0f} % more than foretold, or that much less: "
            f"{RUNS[bars]}{narrow}. They are of other software, with fused kernels, and of steps, without pauses: "
            "docs/plan.md."
        )
        yield (
            f"= cannot be told apart: within {100 * (TIE - 1):.0f} %, more than 2 of 10 pairs of published runs were "
            "the other way round."
        )

    def _ranking_fields(self, ranking: LayoutRanking) -> dict[str, Any]:
        def row(planned: PlannedLayout | Misfit | None) -> dict[str, Any] | None:
            if planned is None:
                return None
            fields = {"layout": str(planned.choice), "settings": planned.choice.settings()}
            memory = {"state": planned.memory.state, "activations": planned.memory.activations}
            if isinstance(planned, Misfit):
                return {**fields, "fits": False, "bytes": memory}
            return {
                **fields, "fits": True, "rank": planned.rank or None, "seconds": planned.seconds, "low": planned.low,
                "high": planned.high if isfinite(planned.high) else None, "bytes": memory, "tight": planned.tight,
                "peak_share": planned.peak_share, "shares": planned.shares,
            }  # fmt: skip

        return {
            "ranks": ranking.ranks,
            "legal": ranking.legal,
            "chosen": row(ranking.chosen),
            "current": row(ranking.current),
            "ranked": [row(each) for each in ranking.ranked],
            "not_foretold": [row(each) for each in ranking.unforetold],
            "do_not_fit": [row(each) for each in ranking.misfits],
        }


def hybrid(file: Path, settings: Sequence[str], recipe: Recipe) -> Recipe:
    """The recipe with the strategy that makes every layout. Raises UsageError for one whose steps are others."""
    if recipe.strategy.name == "hybrid":
        return recipe
    if recipe.strategy.name not in STRATEGIES:
        raise UsageError(
            f"strategy.use={recipe.strategy.name}: a plan knows the steps of {', '.join(STRATEGIES)}: add "
            "strategy.use=hybrid to plan those."
        )
    return read_recipe(file, [*settings, "strategy.use=hybrid"])


def planner_of(recipe: Recipe, as_hybrid: Recipe, device: Device, rates: Rates = SHEET) -> Planner:
    """The planner of a recipe's model, batch and number formats. Raises UsageError with the reason if it has none."""
    numerics = numerics_of(recipe, as_hybrid, device)
    with lazily():
        model, _ = adapted(recipe.model.build(), recipe.adapter, recipe.train.seed)
        blocks = describe_weights(model)
    if recipe.adapter or recipe.optimizer.groups:
        raise UsageError(
            f"{'adapter' if recipe.adapter else 'optimizer.groups'}: a plan counts the products of a model that is "
            "trained whole. Leave it out of the plan's recipe: its step is shorter."
        )
    length = getattr(recipe.dataset.config, "length", 0)
    sizes = transformer(recipe.model.config, length if isinstance(length, int) else 0, blocks)
    if isinstance(sizes, str):
        raise UsageError(
            f"model {recipe.model.name} cannot be planned: {sizes}. `paddle-dp check --ranks N` counts its bytes; "
            "`paddle-dp train --why` measures its step."
        )
    shape: Shape = as_hybrid.strategy.config.shape(as_hybrid)
    tied = bool(getattr(recipe.model.config, "tied", False))
    return Planner(
        model=sizes,
        blocks=blocks,
        shape=replace(shape, partition="uniform"),
        device=device,
        numerics=numerics,
        tied=tied,
        elementwise=getattr(recipe.optimizer.config, "elementwise", True),
        rates=rates,
    )


def numerics_of(recipe: Recipe, as_hybrid: Recipe, device: Device) -> Numerics:
    """The number formats of the recipe on the device. Raises UsageError for one that the device cannot compute."""
    precision = recipe.train.precision
    if recipe.train.device == "cpu" and device.accelerator:
        raise UsageError(
            "train.device=cpu: data sheets are of accelerators: add train.device=auto, or --measured FILE for this "
            "machine's CPU (paddle-dp scale RECIPE --probe FILE measures it)."
        )
    if precision.dtype == "float64":
        raise UsageError(
            "train.precision=float64: no data sheet here has its rate: add train.precision=bfloat16."
        )
    if precision.dtype == "bfloat16" and device.accelerator and not device.bfloat16:
        raise UsageError(
            f"--device {device.name} has no products of bfloat16: add train.precision=float16, or name another device."
        )
    low = precision.is_low and device.accelerator  # CPUs emulate 16 bits in float32
    name = recipe.optimizer.name if recipe.optimizer.name in STATES else "adamw"
    widths = Widths.for_optimizer(name, low=low and precision.level == "O2")
    sent = 2 if getattr(as_hybrid.strategy.config, "reduce_dtype", None) == "bfloat16" else widths.gradient
    return Numerics(
        low=low,
        widths=widths,
        gradient=sent,
        flash=low and device.bfloat16,
        accelerator=device.accelerator,
        masked=masks_documents(recipe),
    )


def current(recipe: Recipe, shape: Shape, ranks: int) -> Candidate | None:
    """The recipe's own layout on so many cards; None if it has none, or one that a plan does not describe."""
    layout = recipe.strategy.config.layout(ranks)
    degrees, micro_batches = layout.degrees, recipe.train.micro_batches
    fitted = replace(
        shape, micro_batches=micro_batches, virtual_stages=layout.virtual_stages,
        pipeline_schedule=layout.pipeline_schedule, cut_lengths=layout.sequence_parallel,
    )  # fmt: skip
    uneven = recipe.train.batch % (degrees.dp_size * micro_batches)
    other_order = degrees.pipeline > 1 and (
        layout.partition != "uniform" or layout.pipeline_schedule == "f_then_b"
    )
    if degrees.ranks != ranks or uneven or other_order or problems(degrees, fitted, ranks):
        return None
    return Candidate(
        degrees=degrees, micro=recipe.train.batch // (degrees.dp_size * micro_batches), micro_batches=micro_batches,
        stage=layout.sharding_stage if degrees.sharding > 1 else 0, virtual_stages=layout.virtual_stages,
        sequence_parallel=layout.sequence_parallel and degrees.tensor > 1, recompute=layout.recompute,
    )  # fmt: skip


def layout_settings(recipe: Recipe, choice: Candidate) -> list[str]:
    """The overrides that give the recipe a layout."""
    use = [] if recipe.strategy.name == "hybrid" else ["strategy.use=hybrid"]
    return [*use, *(f"{key}={value}" for key, value in choice.settings().items())]


def write_chosen(plan: RecipePlan, file: Path, settings: Sequence[str], folder: Path) -> Path:
    """Writes the chosen layout's recipe into the folder, as `paddle-dp train` reads it, and returns its path. Raises
    UsageError if nothing is chosen, if the layout is refused by `check`, or if the file exists."""
    (ranking,) = plan.rankings
    if ranking.chosen is None:
        raise UsageError(
            f"--write {folder}: no layout of {plural(ranking.ranks, 'card')} fits, so none is written."
        )
    path = folder / f"{plan.recipe.name}_{ranking.ranks}.yaml"
    if path.exists():
        raise UsageError(f"--write {folder}: {path} exists: name another folder, or remove it.")
    recipe = read_recipe(file, [*settings, *layout_settings(plan.recipe, ranking.chosen.choice)])
    layout_of(recipe, ranking.ranks)
    folder.mkdir(parents=True, exist_ok=True)
    write_recipe(recipe, path)
    return path


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


def _hours(row: PlannedLayout, steps: int) -> tuple[float, float]:
    return row.low * steps / _HOUR, row.high * steps / _HOUR


def bar_text(row: PlannedLayout) -> str:
    """ "12.8 … 15.2", in the unit of the row's seconds."""
    times = 1.0 if row.seconds >= 1 else 1e3
    high = digits(times * row.high) if isfinite(row.high) else "?"
    return f"{digits(times * row.low)} … {high}"


def _span(row: PlannedLayout) -> str:
    """ "12.8 … 15.2 s"."""
    return f"{bar_text(row)} {'s' if row.seconds >= 1 else 'ms'}"


def _between(low: float, high: float) -> str:
    """ "1,020 to 1,210", of three digits, or "1,020 at least"."""
    first, last = (f"{float(f'{each:.3g}'):,.0f}" if each >= 100 else digits(each) for each in (low, high))
    return f"{first} to {last}" if isfinite(high) else f"{first} at least"


def _shares(shares: dict[str, float]) -> str:
    shown = sorted(((share, name) for name, share in shares.items() if share >= 0.005), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in shown)


def _wrapped(line: str) -> list[str]:
    """The line in pieces of at most 100 columns, those after the first further in."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return wrap(line, _WIDTH, subsequent_indent=indent, drop_whitespace=True, replace_whitespace=False)
