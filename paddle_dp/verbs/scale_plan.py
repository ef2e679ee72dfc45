"""A recipe on more ranks than are here: tables, sentences and a picture of a forecast from a probe and a few steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite, log
from textwrap import wrap
from typing import Any

from paddle_dp.errors import UsageError
from paddle_dp.figures import new_figure, png_of
from paddle_dp.plan.error_bars import BARS, SCALING
from paddle_dp.plan.exchange import mean_bytes
from paddle_dp.plan.probe import Probe
from paddle_dp.plan.published_scaling import OWNERS, PUBLISHED, PublishedSeries
from paddle_dp.plan.scaling import ForetoldStep, MeasuredSteps, ScalingModel
from paddle_dp.recipe import Recipe
from paddle_dp.text import amount, digits, duration, plural
from paddle_dp.verbs.forecast import between, blocks_of, layout_of
from paddle_dp.verbs.layout_plan import STRATEGIES, doublings

WORTH = 0.03  # a change that gives less is not named
DISTURBED = 1.5  # a ratio of the slowest round to the fastest: something else computes on the machine
WIDTH = 100
SHOWN = 3  # published series next to a table


def check_scalable(recipe: Recipe) -> None:
    """Raises UsageError for a recipe whose step cannot be measured on one rank, or whose ranks exchange otherwise."""
    if recipe.strategy.name not in STRATEGIES:
        raise UsageError(
            f"strategy.use={recipe.strategy.name}: scale knows the exchange of {', '.join(STRATEGIES)}: add "
            "strategy.use=data_parallel, or compare runs of that strategy (paddle-dp why)."
        )
    train = recipe.train
    if train.batch % train.micro_batches:
        raise UsageError(
            f"scale measures equal micro-batches, and {train.micro_batches} of them do not divide train.batch "
            f"({train.batch}): add train.micro_batches=1."
        )
    try:
        layout_of(recipe, 1)
    except UsageError as error:
        raise UsageError(
            f"scale measures 1 rank and several, and on 1 rank: {error} `paddle-dp plan` ranks such layouts."
        ) from None


def gradient_bytes(recipe: Recipe) -> float:
    """The bytes of an all-reduced tensor as large as a step's exchange: each of 2 ranks sends them."""
    twice = _with_batch(recipe, 2 * recipe.train.batch)
    layout = layout_of(twice, 2)
    return mean_bytes(blocks_of(recipe), layout, recipe.train.micro_batches, between(twice, layout))


def _with_batch(recipe: Recipe, batch: int) -> Recipe:
    return recipe.model_copy(update={"train": replace(recipe.train, batch=batch)})


@dataclass(frozen=True, kw_only=True)
class ScalePlan:
    """Forecasts of a recipe by number of ranks: `weak` with the recipe's batch on each rank, `strong` with that batch
    in all. `strong` leaves out numbers that do not divide the batch."""

    recipe: Recipe
    probe: Probe
    model: ScalingModel
    weak: tuple[ForetoldStep, ...]
    strong: tuple[ForetoldStep, ...]

    @classmethod
    def make(
        cls,
        recipe: Recipe,
        probe: Probe,
        steps: Sequence[MeasuredSteps],
        last: int,
        link: float | None = None,
    ) -> ScalePlan:
        """The plan up to `last` ranks, from these measured steps; `link`: bytes/s of a machine's network."""
        size, is_cpu = gradient_bytes(recipe), probe.kind == "cpu"

        def exchange(share: float) -> float:
            """Seconds of an all-reduce of this share of the bytes."""
            return probe.collective_seconds("all_reduce", share * size) if probe.collectives and size else 0.0

        model = ScalingModel(
            single=[each for each in steps if each.ranks == 1],
            together=[each for each in steps if each.ranks > 1],
            ranks=probe.ranks, crowding=probe.crowding(), size=size, node=probe.node, link=link, hides=not is_cpu,
            exchange=exchange(1.0), halved=exchange(0.5) / exchange(1.0) if exchange(1.0) else 0.5,
            bar=BARS["other"] if is_cpu else SCALING,
        )  # fmt: skip
        batch, numbers = recipe.train.batch, sorted({*doublings(1, last), probe.ranks})
        return cls(
            recipe=recipe, probe=probe, model=model, weak=tuple(model.step(n, float(batch)) for n in numbers),
            strong=tuple(model.step(n, batch / n) for n in numbers if batch % (n * recipe.train.micro_batches) == 0),
        )  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yields the screen's lines, of 100 columns."""
        batch, probe = self.recipe.train.batch, self.probe
        threads = f", {plural(probe.threads, 'thread')} each" if probe.threads else ""
        yield f"{self.recipe.name} on {probe.name}{threads}; a step exchanges {amount(self.model.size)}"
        yield ""
        yield f"{'':6s}{f'weak: {batch} samples on each rank':44s}{f'strong: {batch} samples in all'}"
        head = f"{'a step (bar)':>31s}"
        yield f"{'ranks':>5s} {head} {'efficiency':>10s}  {head} speed-up   sends"
        strong = {each.ranks: each for each in self.strong}
        for step in self.weak:
            row = f"{step.ranks:5d} {_shown(step):>31s} {_share(step, self.efficiency(step)):>10s}"
            if step.ranks in strong:
                other = strong[step.ranks]
                row += f"  {_shown(other):>31s} {_share(other, self.speed_up(other), times=True):>8s}"
            else:
                row += f"  {'the batch is not divisible':>31s} {'':8s}"
            yield f"{row} {amount(step.sent):>7s}"
        yield ""
        for sentence in self.sentences():
            yield from wrap(sentence, WIDTH, subsequent_indent="  ")

    def sentences(self) -> Iterator[str]:
        """Yields conclusions from the table: whether it pays, how good the forecast was, which change would help."""
        probe, model = self.probe, self.model
        yield "* measured, between the fastest and the slowest round; ≥ at least, a bound and no forecast."
        if not model.together:
            yield (
                "No collectives were measured, for one rank has no other: the rows of more ranks are the bytes that a "
                "rank sends and the shortest step" + (
                    "." if model.link else ", without the network (--link SPEED adds it)."
                )
            )  # fmt: skip
        elif model.link is None and any(each.kind == "bound" for each in self.weak):
            yield (
                f"Beyond the {plural(model.node, 'rank')} of this machine the network counts, and it is not known: add "
                "--link SPEED, of one machine, such as '10 Gbit/s'."
            )
        if probe.kind == "cpu" and probe.ranks > 1:
            yield (
                f"A rank has {plural(probe.threads, 'thread')} here, alone too: one process with all "
                f"{probe.machine.get('processors')} processors is another comparison."
            )
        yield from self.disturbed()
        yield from self.verdict()
        yield from self.examined()
        yield self.advice()
        for series in self.published():
            efficiencies = series.efficiencies().items()
            shares = ", ".join(f"{n} cards {share:.0%}" for n, share in efficiencies if n > 1)
            yield f"published: {series.name} ({OWNERS[series.owner]}): {shares}"
        is_cpu = probe.kind == "cpu"
        kind = "no published run is of CPUs" if is_cpu else "42 points of Paddle's published series"
        yield f"bars: the spread of the rounds here, times {model.bar:g} ({kind}): docs/plan.md"

    def efficiency(self, step: ForetoldStep) -> float:
        """The share of its ranks that a step puts to use."""
        return step.rate / step.ranks / self.weak[0].rate

    def speed_up(self, step: ForetoldStep) -> float:
        """How many times as fast as on one rank a global batch is done."""
        return step.rate / self.weak[0].rate

    def verdict(self) -> Iterator[str]:
        """Yields the answer to «does my second card pay?»: the measured steps of several ranks and of one."""
        single = self.model.single[0]
        noun = "rank" if self.probe.kind == "cpu" else "card"
        for step in self.model.together[:1]:
            ratio, low, high = step.times(single)
            unsure = "it cannot be told, the rounds differ too much"
            answer = "yes" if low > 1 else "no" if high < 1 else unsure
            called = f"a second {noun}" if step.ranks == 2 else f"{step.ranks} {noun}s instead of one"
            yield (
                f"Does {called} pay? {answer}: {ratio:.2f} times the samples a second ({low:.2f} … {high:.2f} in "
                f"8 of 10 turns), so a sample costs {step.ranks / ratio:.2f} times as much."
            )

    def disturbed(self) -> Iterator[str]:
        """Yields a warning if rounds of one measurement differ much."""
        worst = max(each.high / each.low for each in (*self.model.single, *self.model.together))
        if worst > DISTURBED:
            yield (
                f"! Rounds of the same steps differ by up to {worst:.1f} times: something else computes on this "
                "machine, and all of this may be wrong. Measure again when it is idle."
            )

    def examined(self) -> Iterator[str]:
        """Yields how far the forecast of the measured ranks was off, from one rank and the probe alone."""
        for step in self.model.together:
            seconds, low, high = self.model.from_single(step.samples)
            off = step.seconds / seconds - 1
            yield (
                f"{step.ranks} ranks of {step.samples:g} samples, from 1 rank and the collectives alone: "
                f"{_between(seconds, low, high)} foretold, {_between(step.seconds, step.low, step.high)} measured, "
                f"{abs(off):.0%} {'more' if off > 0 else 'less'}."
            )

    def changes(self) -> list[tuple[float, str]]:
        """Changes by their gain in samples/s, at the largest number of ranks that is foretold; the largest first."""
        foretold = [each for each in self.weak if each.ranks > 1 and each.kind != "bound"]
        if not foretold:
            return []
        step, model = foretold[-1], self.model
        plain = model.step(step.ranks, step.samples, measured_too=False)
        at = f"on {plural(step.ranks, 'rank')}"
        larger = model.step(step.ranks, 2 * step.samples)
        halved = model.step(step.ranks, step.samples, half=True)
        gains = [(larger.rate / plain.rate - 1, f"train.batch twice as large {at}, another training")]
        if layout_of(_with_batch(self.recipe, 2 * self.recipe.train.batch), 2).sends_float32:
            name = "strategy={use: hybrid, reduce_dtype: bfloat16}"
            gains.append((halved.rate / plain.rate - 1, f"{name} {at}, gradients in half as many bytes"))
        fastest = max(self.strong, key=lambda each: each.rate if each.kind != "bound" else 0.0)
        slower = [each for each in self.strong if each.ranks > fastest.ranks and each.kind != "bound"]
        if slower:
            gain = fastest.rate / slower[-1].rate - 1
            gains.append(
                (gain, f"{plural(fastest.ranks, 'rank')} in place of {slower[-1].ranks} for one global batch")
            )
        return sorted(gains, reverse=True)

    def advice(self) -> str:
        """The cheapest changes, each with its gain."""
        if not self.model.together:
            return "What a change would give is foretold after a measurement on 2 ranks."
        gains = [f"{name}: {gain:+.0%} samples/s" for gain, name in self.changes() if gain >= WORTH]
        return (
            f"Changes that would help: {'; '.join(gains)}."
            if gains
            else "No change of batch or exchange gives 3 %."
        )

    def published(self) -> list[PublishedSeries]:
        """The published series that exchange most nearly as many bytes; of each model the nearest."""
        size = max(self.model.size, 1.0)
        ordered = sorted(PUBLISHED, key=lambda each: abs(log(each.size / size)))
        models: dict[str, PublishedSeries] = {}
        for series in ordered:
            models.setdefault(series.name.partition(" ")[0] + series.owner, series)
        return [*models.values()][:SHOWN]

    def as_fields(self) -> dict[str, Any]:
        """The plan as one JSON object; seconds without a limit are null."""

        def row(step: ForetoldStep) -> dict[str, Any]:
            return {**asdict(step), "high": step.high if isfinite(step.high) else None}

        return {
            "recipe": self.recipe.name, "batch": self.recipe.train.batch, "exchange_bytes": self.model.size,
            "measured": [asdict(each) for each in (*self.model.single, *self.model.together)],
            "foretold_from_one": [
                {"ranks": each.ranks, "samples": each.samples, "seconds": self.model.from_single(each.samples)[0]}
                for each in self.model.together
            ],
            "weak": [row(each) for each in self.weak], "strong": [row(each) for each in self.strong],
            "changes": [{"gain": gain, "change": name} for gain, name in self.changes()],
            "published": [asdict(each) | {"source": OWNERS[each.owner]} for each in self.published()],
            "probe": self.probe.as_fields(),
        }  # fmt: skip

    def draw(self) -> bytes:
        """The PNG: efficiency of weak scaling, speed-up of strong scaling, with published series."""
        figure = new_figure(11, 4.2, dpi=110, layout="constrained")
        left, right = figure.subplots(1, 2)
        for series in self.published():
            shares = {n: 100 * share for n, share in series.efficiencies().items()}
            left.plot([*shares], [*shares.values()], "-", lw=1, alpha=0.6, label=f"published: {series.name}")
        base = self.weak[0]
        for axis, steps, scale in (
            (left, self.weak, lambda step: 100 * self.efficiency(step)),
            (right, self.strong, self.speed_up),
        ):
            for kind, marker in {"measured": "o", "foretold": "s", "bound": "v"}.items():
                shown = [step for step in steps if step.kind == kind]
                if not shown:
                    continue
                values = [scale(step) for step in shown]
                below = [v - v * step.seconds / step.high for v, step in zip(values, shown, strict=True)]
                above = [v * step.seconds / step.low - v for v, step in zip(values, shown, strict=True)]
                bars = [below, above] if kind != "bound" else None
                axis.errorbar(
                    [step.ranks for step in shown], values, yerr=bars, fmt=marker, ms=6, capsize=3, color="C0",
                    mfc="C0" if kind == "measured" else "white", label="at most" if kind == "bound" else kind,
                )  # fmt: skip
            numbers = [step.ranks for step in steps]
            axis.set_xscale("log", base=2)
            axis.set_xticks(numbers, [str(n) for n in numbers])
            axis.minorticks_off()
            axis.set_xlabel("ranks")
            axis.spines[["top", "right"]].set_visible(False)
        left.set(ylim=(0, None), ylabel="efficiency, %", title=f"weak: {base.samples:g} samples on each rank")
        ideal = [step.ranks for step in self.strong]
        right.plot(ideal, ideal, "--", lw=1, color="gray", label="as many times as ranks")
        right.set(
            yscale="log", ylabel="times as fast as 1 rank", title=f"strong: {base.samples:g} samples in all"
        )
        for axis in (left, right):
            axis.legend(frameon=False, fontsize=7.5)
        figure.suptitle(f"{self.recipe.name} on {self.probe.name}", fontsize=10)
        return png_of(figure)


def _shown(step: ForetoldStep) -> str:
    if step.kind == "bound":
        return f"≥ {duration(step.seconds)}"
    mark = "*" if step.kind == "measured" else " "
    return f"{mark}{_between(step.seconds, step.low, step.high)}"


def _between(seconds: float, low: float, high: float) -> str:
    """ "12.5 ms (11.9 … 14.2)"."""
    times = 1.0 if seconds >= 1 else 1e3
    return f"{duration(seconds)} ({digits(times * low)} … {digits(times * high)})"


def _share(step: ForetoldStep, share: float, times: bool = False) -> str:
    sign = "≤ " if step.kind == "bound" else ""
    return f"{sign}{share:.2f} ×" if times else f"{sign}{share:.0%}"
