"""Numbers of a recipe that depend on its ranks, `train.batch: 32 per rank` and `train.micro_batches: auto`, replaced
by global numbers: a run's recipe has these, and trains the same on any other ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.launch.command import Job
from paddle_dp.launch.machine import Machine, available_memory
from paddle_dp.launch.plan import recipe_plan
from paddle_dp.launch.silence import import_paddle
from paddle_dp.recipe.read import read_recipe, train_settings
from paddle_dp.text import plural
from paddle_dp.units import Bytes


@dataclass(frozen=True, kw_only=True)
class BatchNumbers:
    """The overrides, and a sentence on each. Both are empty for a recipe with global numbers."""

    overrides: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def with_batch_numbers(job: Job) -> Job:
    """The job with global numbers in place of those that depend on its ranks, which it prints. Raises UsageError as
    `batch_numbers` does, and if the number of ranks may change."""
    _, per_rank, auto = _requested(job.recipe, job.all_overrides)
    if not per_rank and not auto:
        return job
    if job.elastic:
        raise UsageError(
            "--ranks MIN:MAX lets the number of ranks change, and the batch must stay the same: write train.batch and "
            "train.micro_batches as numbers over all ranks."
        )
    stand_ins = [*["train.batch=1000000000"] * bool(per_rank), *["train.micro_batches=1"] * bool(auto)]
    plan = recipe_plan(job, Machine.here(), read_recipe(job.recipe, [*job.all_overrides, *stand_ins]))
    numbers = batch_numbers(job.recipe, job.all_overrides, plan.ranks, plan.nodes)
    print(*numbers.remarks, sep="\n", flush=True)
    return replace(job, overrides=(*job.overrides, *numbers.overrides))


def with_batch_numbers_in_rank(job: Job, variables: Mapping[str, str]) -> tuple[Job, Sequence[str]]:
    """The job with global numbers, and a sentence on each, in a rank that another launcher has started: `variables` say
    how many there are. Raises UsageError as `batch_numbers` does, and if each rank would measure its own memory."""
    _, per_rank, auto = _requested(job.recipe, job.all_overrides)
    ranks = int(variables.get("PADDLE_TRAINERS_NUM", "1"))
    if not per_rank and not auto:
        return job, ()
    if auto and not auto[1] and ranks > 1:
        raise UsageError(
            "train.micro_batches=auto: under this launcher each rank would measure the free memory for itself. Say how "
            "much a rank may use: train.micro_batches='auto 16 GB'."
        )
    numbers = batch_numbers(job.recipe, job.all_overrides, ranks)
    return replace(job, overrides=(*job.overrides, *numbers.overrides)), numbers.remarks


def batch_numbers(
    path: Path, overrides: Sequence[str], ranks: int | None, nodes: int = 1, kind: str = ""
) -> BatchNumbers:
    """The recipe's global numbers on `ranks` ranks of each node; None: stand-ins, of one data rank. `kind`: the kind of
    device on other machines, whose memory is not known here; "": this machine.

    Raises UsageError if no number of micro-batches fits, or if it is not known; RecipeError for other mistakes.
    """
    train, per_rank, auto = _requested(path, overrides)
    settings, remarks, undivided = [], [], ["train.micro_batches=1"] if auto else []
    limit: float | None = _amount(auto[1]) if auto and auto[1] else None
    if ranks is None:
        settings = [*([f"train.batch={per_rank[1]}"] if per_rank else []), *undivided]
        remarks = [f"{each.partition('=')[0]} depends on the ranks: --ranks N prints it" for each in settings]
        return BatchNumbers(overrides=tuple(settings), remarks=tuple(remarks))
    if per_rank:
        share = int(per_rank[1])
        recipe = read_recipe(path, [*overrides, f"train.batch={share * ranks * nodes}", *undivided])
        readers = recipe.strategy.config.layout(ranks * nodes).degrees.dp_size
        settings.append(f"train.batch={share * readers}")
        remarks.append(f"train.batch is {share * readers}: {share} × {plural(readers, 'data rank')}")
    if auto:
        has_devices = kind != "cpu" if kind else Machine.here().devices
        on_cpu = train.get("device", "auto") == "cpu" or not has_devices
        available = available_memory() if on_cpu and nodes == 1 and not kind else None
        limit = (available and available / ranks) if limit is None else limit
        if limit is None:
            raise UsageError(
                "train.micro_batches=auto: how much memory the ranks' devices have is not known here. Say how much a "
                "rank may use: train.micro_batches='auto 16 GB'."
            )
        import_paddle()
        from paddle_dp.verbs.forecast import fitting

        chosen = [*overrides, *settings, *undivided, *(["train.device=cpu"] if on_cpu else [])]
        count, sentence = fitting(read_recipe(path, chosen), ranks * nodes, limit)
        settings.append(f"train.micro_batches={count}")
        remarks.append(f"train.micro_batches is {count}: {sentence}")
    return BatchNumbers(overrides=tuple(settings), remarks=tuple(remarks))


def _requested(
    path: Path, overrides: Sequence[str]
) -> tuple[Mapping[str, Any], re.Match[str] | None, re.Match[str] | None]:
    """The settings of `train` as written, with the matches of `batch: 32 per rank` and `micro_batches: auto 16 GB`.

    They are empty for a recipe with mistakes, which its reader reports.
    """
    try:
        train = train_settings(path, overrides)
    except PaddleDPError:
        train = {}
    per_rank = re.fullmatch(r"\s*([0-9]+)\s+per\s+rank\s*", str(train.get("batch")))
    return train, per_rank, re.fullmatch(r"\s*auto(?:\s+(.+))?", str(train.get("micro_batches")))


def _amount(text: str) -> int:
    try:
        return int(Bytes.parse(text).count)
    except ValueError as error:
        raise UsageError(f"train.micro_batches='auto {text}': {error}.") from None
