"""Plans a recipe for accelerators that are not here: its layouts on each number of cards, as one object.

No process starts and no sample is read. The model is built without memory for its weights, to read their shapes.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

from paddle_dp.axes.meta_init import describe_weights, units
from paddle_dp.errors import UsageError
from paddle_dp.part import adapted, find
from paddle_dp.part.config import fields_of
from paddle_dp.plan import problems
from paddle_dp.plan.candidates import Candidate, Numerics
from paddle_dp.plan.devices import Device, used_cards
from paddle_dp.plan.error_bars import BARS, RUNS, STAGE3, TIE
from paddle_dp.plan.kernel_time import SHEET, Rates
from paddle_dp.plan.layout import Layout, total_parameters
from paddle_dp.plan.legal import Shape, sample_length
from paddle_dp.plan.memory import Widths, states_of
from paddle_dp.plan.probe import Probe
from paddle_dp.plan.ranking import LayoutRanking, Misfit, PlannedLayout, Planner
from paddle_dp.plan.transformer import Transformer, transformer
from paddle_dp.recipe import Recipe, read_recipe
from paddle_dp.recipe.write import write_recipe
from paddle_dp.text import amount, duration, plural
from paddle_dp.verbs.forecast import layout_of, masks_documents
from paddle_dp.verbs.traced_recipe import not_planned, traced_recipe, weightless

MOST_RANKS = 4096
STRATEGIES = ("single", "data_parallel", "hybrid")  # whose steps a plan knows


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
        numbers += doublings(first, last)
    return sorted({*numbers})


def doublings(first: int, last: int) -> list[int]:
    """The first number, twice it, four times …, and the last."""
    return [first * 2**n for n in range(last.bit_length()) if first * 2**n < last] + [last]


@dataclass(frozen=True, kw_only=True)
class RecipePlan:
    """The rankings of a recipe's layouts, one for each number of cards; `price` of a card-hour, if it was given.
    `reasons`: by the number of cards, why the recipe as it is has no layout on so many."""

    recipe: Recipe
    planner: Planner
    rankings: tuple[LayoutRanking, ...]
    reasons: Mapping[int, str]
    price: float | None = None

    @classmethod
    def make(
        cls, file: Path, settings: Sequence[str], ranks: Sequence[int], device: Device, price: float | None = None,
        probe: Probe | None = None,
    ) -> RecipePlan:  # fmt: skip
        """Plans the recipe in the file for each of these numbers of cards; `probe`: the device was measured. Raises
        UsageError for a recipe that cannot be planned, with the reason."""
        recipe = read_recipe(file, settings)
        dtype = recipe.train.precision.dtype
        rates = SHEET if probe is None else probe.checked_rates(device, dtype, max(ranks))
        planner = planner_of(recipe, hybrid(file, settings, recipe), device, rates)
        layouts = {n: current(recipe, planner.shape, n) for n in ranks}
        reasons = {n: layout for n, layout in layouts.items() if isinstance(layout, str)}
        known = {n: layout for n, layout in layouts.items() if isinstance(layout, Candidate)}
        rankings = tuple(planner.ranking(n, known.get(n)) for n in layouts)
        if not any(ranking.legal for ranking in rankings):
            raise UsageError(_no_layout(planner, ranks))
        return cls(recipe=recipe, planner=planner, rankings=rankings, reasons=reasons, price=price)

    @property
    def lacking(self) -> str:
        """A sentence on settings of the recipe's strategy that no layout here has; "" for none."""
        lacking = ", ".join(_as_hybrid(self.recipe)[1])
        return lacking and f"every layout here is hybrid's, which has no setting {lacking}: left out"

    def as_fields(self) -> dict[str, Any]:
        """The plan as one JSON object; seconds without a limit are null."""
        bars = self.planner.bars
        return {
            "recipe": self.recipe.name, "lacking": _as_hybrid(self.recipe)[1],
            "parameters": total_parameters(self.planner.blocks),
            "model": self._model_fields(), "batch": self.recipe.train.batch,
            "device": asdict(self.planner.device),
            "bar": {"class": bars, "ratio": BARS[bars], "runs": RUNS[bars], "tie": TIE, "stage3": STAGE3},
            "rankings": [self._ranking_fields(ranking) for ranking in self.rankings],
        }  # fmt: skip

    def _model_fields(self) -> dict[str, Any]:
        model = self.planner.model
        if isinstance(model, Transformer):
            return asdict(model)
        names = ("inputs", "blocks", "flops")
        return {name: getattr(model, name) for name in names} | {"operators": len(model.operators)}

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
            "ranks": ranking.ranks, "legal": ranking.legal,
            "chosen": row(ranking.chosen), "current": row(ranking.current),
            "ranked": [row(each) for each in ranking.ranked],
            "not_foretold": [row(each) for each in ranking.unforetold],
            "do_not_fit": [row(each) for each in ranking.misfits],
        }  # fmt: skip


def hybrid(file: Path, settings: Sequence[str], recipe: Recipe) -> Recipe:
    """The recipe with the strategy that makes every layout. Raises UsageError for one whose steps are others."""
    if recipe.strategy.name == "hybrid":
        return recipe
    if recipe.strategy.name not in STRATEGIES:
        raise UsageError(
            f"strategy.use={recipe.strategy.name}: a plan knows the steps of {', '.join(STRATEGIES)}: add "
            "strategy.use=hybrid to plan those."
        )
    return read_recipe(file, [*settings, *_as_hybrid(recipe)[0]])


def _as_hybrid(recipe: Recipe) -> tuple[list[str], list[str]]:
    """The overrides that give the recipe hybrid, with the settings of its strategy that hybrid has, too; and changed
    ones that it lacks. Another `use` alone would leave all of them out."""
    strategy, known = recipe.strategy, fields_of(find("strategies", "hybrid"))
    if strategy.name == "hybrid":
        return [], []
    default = replace(strategy, config=type(strategy.config)()).settings
    texts = {key: f"strategy.{key}={json.dumps(value)}" for key, value in strategy.settings.items()}
    kept = [text for key, text in texts.items() if key in known]
    changed = [key for key, value in strategy.settings.items() if key != "use" and value != default[key]]
    return ["strategy.use=hybrid", *kept], [texts[key] for key in changed if key not in known]


def planner_of(recipe: Recipe, as_hybrid: Recipe, device: Device, rates: Rates = SHEET) -> Planner:
    """The planner of a recipe's model, batch and number formats. Raises UsageError with the reason if it has none."""
    numerics = numerics_of(recipe, as_hybrid, device)
    with weightless(recipe):
        model, _ = adapted(recipe.model.build(), recipe.adapter, recipe.train.seed)
        blocks = describe_weights(model)
    partly = {
        "adapter": recipe.adapter, "optimizer.groups, frozen": any(each.frozen for each in recipe.optimizer.groups),
        "turns": recipe.turns,
    }  # fmt: skip
    for key in (key for key, value in partly.items() if value):
        raise UsageError(
            f"{key}: a plan counts the products of a model that is trained whole. Leave it out of the plan's "
            "recipe: its step is another."
        )
    length = sample_length(recipe.model.config, recipe.dataset.config)
    sizes = transformer(recipe.model.config, length, blocks)
    names_sizes = all(hasattr(recipe.model.config, name) for name in ("width", "depth", "heads"))
    if isinstance(sizes, str) and names_sizes:
        raise not_planned(recipe, sizes)
    planned = traced_recipe(recipe) if isinstance(sizes, str) else sizes
    shape: Shape = as_hybrid.strategy.config.shape(as_hybrid, model)
    tied = bool(getattr(recipe.model.config, "tied", False))
    flops = getattr(recipe.optimizer.config, "update_flops", None)
    if flops is not None:
        recipe.optimizer.prepare(model)
        updated = units(model)[1] if isinstance(planned, Transformer) else model
        numerics = replace(numerics, update_flops=flops(updated.parameters()))
    return Planner(
        model=planned, blocks=blocks, shape=replace(shape, partition="uniform"), device=device, numerics=numerics,
        tied=tied, elementwise=getattr(recipe.optimizer.config, "elementwise", True), rates=rates,
    )  # fmt: skip


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
    widths = Widths.for_states(states_of(recipe), low=low and precision.level == "O2")
    return Numerics(
        low=low, widths=widths, reduce_dtype=as_hybrid.strategy.config.reduce_dtype, flash=low and device.bfloat16,
        accelerator=device.accelerator, masked=masks_documents(recipe),
        sync_norms=bool(as_hybrid.strategy.config.sync_batch_norm),
    )  # fmt: skip


def current(recipe: Recipe, shape: Shape, ranks: int) -> Candidate | str:
    """The recipe's own layout on so many cards, or the reason why it has none that a plan describes."""
    layout = recipe.strategy.config.layout(ranks)
    degrees, micro_batches = layout.degrees, recipe.train.micro_batches
    if degrees.ranks != ranks:
        return f"its layout is of {plural(degrees.ranks, 'card')}"
    shares = degrees.dp_size * micro_batches
    if type(layout) is not Layout:
        return "a plan describes whole gradients, and strategy.compress sends fewer bytes"
    if recipe.train.batch % shares:
        return (
            f"{plural(micro_batches, 'micro-batch', 'micro-batches')} on {degrees.dp_size} shares of the batch: "
            f"{recipe.train.batch} samples cannot be divided by {shares}"
        )
    if degrees.pipeline > 1 and (layout.partition != "uniform" or layout.pipeline_schedule == "f_then_b"):
        return "a plan describes uniform stages, and no f_then_b"
    fitted = replace(
        shape, micro_batches=micro_batches, virtual_stages=layout.virtual_stages,
        pipeline_schedule=layout.pipeline_schedule, cut_lengths=layout.sequence_parallel,
    )  # fmt: skip
    if wrong := problems(degrees, fitted, ranks):
        return "; ".join(wrong)
    return Candidate(
        degrees=degrees, micro=recipe.train.batch // shares, micro_batches=micro_batches,
        stage=layout.sharding_stage if degrees.sharding > 1 else 0, virtual_stages=layout.virtual_stages,
        sequence_parallel=layout.sequence_parallel and degrees.tensor > 1, recompute=layout.recompute,
    )  # fmt: skip


def _no_layout(planner: Planner, ranks: Sequence[int]) -> str:
    """The reason why no number of cards has a layout, with the nearest ones that have."""
    shape, first = planner.shape, ranks[0]
    around = (n for step in range(1, first + 1) for n in (first - step, first + step) if 0 < n <= MOST_RANKS)
    near = list(islice((n for n in around if planner.has_layout(n)), 2))
    model = planner.model
    if isinstance(model, Transformer):
        sizes = f"heads {shape.heads}, layers {model.depth}"
    else:
        sizes = plural(model.blocks, "block")
    return (
        f"--ranks {','.join(map(str, ranks))}: no layout of so many cards divides the batch ({shape.batch}) and the "
        f"model ({sizes}). Nearest: {' and '.join(map(str, sorted(near)))}; or change train.batch."
    )


def layout_settings(recipe: Recipe, choice: Candidate) -> list[str]:
    """The overrides that give the recipe a layout."""
    return [*_as_hybrid(recipe)[0], *(f"{key}={value}" for key, value in choice.settings().items())]


def write_chosen(plan: RecipePlan, file: Path, settings: Sequence[str], folder: Path) -> Path:
    """Writes the chosen layout's recipe into the folder, as `paddle-dp train` reads it, and returns its path. Raises
    UsageError if nothing is chosen, if the layout is refused by `check`, or if the file exists."""
    (ranking,) = plan.rankings
    chosen, device = ranking.chosen, plan.planner.device
    if chosen is None:
        raise UsageError(
            f"--write {folder}: no layout of {plural(ranking.ranks, 'card')} fits, so none is written."
        )
    path = folder / f"{plan.recipe.name}_{ranking.ranks}.yaml"
    if path.exists():
        raise UsageError(f"--write {folder}: {path} exists: name another folder, or remove it.")
    recipe = read_recipe(file, [*settings, *layout_settings(plan.recipe, chosen.choice)])
    layout_of(recipe, ranking.ranks)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"--write {folder}: a file has this name: name a folder.") from None
    published = (
        f"(8 of 10 published runs of other software: {duration(chosen.low)} to {duration(chosen.high)})"
    )
    foretold = f"{duration(chosen.seconds)} a step {published if chosen.rank else 'at least'}"
    header = (
        f"# Planned for {plural(ranking.ranks, 'card')} {device.name}: {foretold}; {amount(chosen.memory.total)} on "
        f"the fullest{', which is tight' if chosen.tight else ''}.\n"
        + (f"# Of the recipe: {plan.lacking}.\n" if plan.lacking else "")
        + f"# Every default is written out. Start:  {start_command(path, ranking.ranks, device.node)}\n"
    )
    write_recipe(recipe, path, header)
    return path


def start_command(path: Path, ranks: int, node: int) -> str:
    """The command that trains a recipe on so many cards, in nodes of at most `node`: the same on each of several."""
    each = used_cards(ranks, node)
    nodes = f" --nodes {ranks // each} --master HOST:PORT --node-rank R" if ranks > each else ""
    return f"paddle-dp train {shlex.quote(str(path))} --ranks {each}{nodes}"
