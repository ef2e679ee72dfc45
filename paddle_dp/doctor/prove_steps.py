"""The steps of `paddle-dp doctor --prove`: which verbs each runs, and the rows that their results give."""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from paddle_dp.doctor.bench import Bench, ChildResult
from paddle_dp.doctor.proof_file import ProofRow
from paddle_dp.doctor.prove import ProveStep, failed_row
from paddle_dp.launch.machine import spoken
from paddle_dp.text import amount, duration, plural

RECIPE, MEASUREMENTS = "gpt_tiny", "paddle_dp.doctor.prove_rank"
MOST_SPLITS = 8  # an axis has 2, 4 or 8 ranks
VERIFY_STEPS = 4
SAME, DIFFERENT, REFUSED, NOTHING_PROVEN = 0, 1, 2, 3  # exit statuses of verify
# The model of the speed step on devices; on CPUs it is the recipe's.
DEVICE_SIZES = (
    "model.width=512", "model.depth=8", "model.heads=8", "model.length=256", "model.vocab=8192",
    "dataset.length=256", "dataset.vocab=8192",
)  # fmt: skip
BATCH, SPEED_STEPS, READ_EVERY = 16, 60, 10  # samples of a rank, and steps
# Without these, GPU kernels add up in an order that changes from run to run.
DETERMINISTIC = {"FLAGS_cudnn_deterministic": "1", "FLAGS_embedding_deterministic": "1"}
RESUME_STEPS, SAVE_EVERY, KILL_AT = 30, 10, 15
UNITS = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
NO_OTHER = "1 rank has no other: nothing to compare"

Layout = tuple[str, list[str]]  # its name and its settings


def machine(bench: Bench) -> Iterator[ProofRow]:
    """Yields the row of the machine: cards, versions, processors, memory."""
    result = bench.child(MEASUREMENTS, "machine", "machine.json")
    if result.status:
        yield failed_row("machine", "machine", result)
        return
    report = {"device": bench.kind, **_report(bench, "machine.json")}
    cards = sorted({card["model"] for card in report["cards"]})
    computes = f"{plural(bench.ranks, 'rank')} on {spoken(bench.kind)}{'s' * (bench.ranks > 1)}"
    warning = ": this proves nothing about GPUs" if bench.is_cpu else f" ({', '.join(cards)})"
    versions, names = report["versions"], ("paddle", "cuda", "nccl", "driver")
    libraries = [f"{name} {versions[name]}" for name in names if name in versions]
    yield ProofRow(
        step="machine", name="machine", sentence=f"{computes}{warning}; {', '.join(libraries)}",
        state="look" if bench.is_cpu else "ok", seconds=result.seconds, values=report,
    )  # fmt: skip


def exchange(bench: Bench) -> Iterator[ProofRow]:
    """Yields the row of sums between ranks: whether they are right, and milliseconds by size."""
    if bench.ranks == 1:
        yield ProofRow(step="exchange", name="exchange", sentence=NO_OTHER)
        return
    result = bench.launch("launch", MEASUREMENTS, "exchange", str(bench.folder / "exchange.json"))
    if result.status:
        yield failed_row("exchange", "exchange", result)
        return
    report = _report(bench, "exchange.json")
    times = {f"{size} MB": 1e3 * seconds for size, seconds in report["seconds_by_megabytes"].items()}
    right = not report["wrong"]
    sums = "sums are right" if right else f"wrong sums on {plural(len(report['wrong']), 'rank')}"
    speeds = ", ".join(f"{size} in {number:.3g} ms" for size, number in times.items())
    yield ProofRow(
        step="exchange", name="exchange", sentence=f"{report['library']}: {sums}; {speeds}", agrees=right,
        state="ok" if right else "mend", seconds=result.seconds,
        values={"library": report["library"], "wrong_ranks": report["wrong"], "milliseconds": times},
    )  # fmt: skip


def layouts_for(ranks: int) -> list[Layout]:
    """Returns the layouts that `ranks` ranks allow, on all of them; none for one rank.

    A split axis has the largest degree of 2, 4 and 8 that divides the ranks; the data axis has the rest.
    """
    if ranks < 2:
        return []
    degree = math.gcd(ranks, MOST_SPLITS)
    rows: list[tuple[dict[str, int], list[str]]] = []
    if degree > 1:
        stages = min(degree, 4)
        rows += [
            ({"tensor": degree}, []), ({"tensor": degree}, ["sequence_parallel=true"]),
            ({"pipeline": stages}, ["pipeline_schedule=1f1b"]),
            ({"pipeline": stages}, ["pipeline_schedule=interleaved"]),
            *(({"sharding": degree}, [f"sharding_stage={stage}"]) for stage in (1, 2, 3)),
            ({"sequence": degree}, []),
        ]  # fmt: skip
    rows.append(({}, ["recompute=full"]))
    if degree > 2:
        rows.append(({"tensor": 2, "pipeline": 2}, []))
        rows.append(({"sharding": 2, "tensor": 2}, ["sharding_stage=2", "sequence_parallel=true"]))
    layouts = [("data_parallel", ["strategy.use=data_parallel"]), (f"data {ranks}", ["strategy.use=hybrid"])]
    layouts += [_layout(ranks, *row) for row in rows]
    return [(name, [*settings, *sizes_for(degree)]) for name, settings in layouts]


def _layout(ranks: int, degrees: dict[str, int], settings: Sequence[str]) -> Layout:
    """Returns the layout's name, such as "data 2 × tensor 2, sequence_parallel", and its settings."""
    data = ranks // math.prod(degrees.values())
    axes = {**({"data": data} if data > 1 else {}), **degrees}
    named = [setting.removesuffix("=true").replace("=", " ") for setting in settings]
    name = ", ".join([" × ".join(f"{axis} {size}" for axis, size in axes.items()), *named])
    arguments = [*(f"{axis}={size}" for axis, size in degrees.items()), *settings]
    return name, ["strategy.use=hybrid", *(f"strategy.{word}" for word in arguments)]


def sizes_for(degree: int) -> list[str]:
    """Returns the settings with which the recipe's model can be split `degree` times."""
    heads = [f"model.heads={degree}", f"model.width={8 * degree}"] if degree > 4 else []
    blocks = ["model.depth=6", "train.micro_batches=4"] if degree > 2 else []  # 4 ranks with 2 stages each
    return ["train.batch=16", *heads, *blocks]


def layouts(bench: Bench) -> Iterator[ProofRow]:
    """Yields a row for each layout, verified against one process."""
    yield from _verified("layouts", layouts_for(bench.ranks), bench)


def precision(bench: Bench) -> Iterator[ProofRow]:
    """Yields a row for each low precision, verified in data_parallel."""
    rows: list[Layout] = [
        (f"{dtype} {level}", ["strategy.use=data_parallel", f"train.precision.dtype={dtype}",
                              f"train.precision.level={level}", "train.batch=16"])
        for dtype in ("bfloat16", "float16") for level in ("O1", "O2")
    ]  # fmt: skip
    yield from _verified("precision", rows if bench.ranks > 1 else [], bench)


def _verified(step: str, rows: Sequence[Layout], bench: Bench) -> Iterator[ProofRow]:
    if not rows:
        yield ProofRow(step=step, name=step, sentence=NO_OTHER)
    for name, settings in rows:
        arguments = ("--ranks", str(bench.ranks), "--steps", str(VERIFY_STEPS), "--json", *settings)
        result = bench.verb("verify", RECIPE, *arguments)
        try:
            yield verified_row(step, name, settings, result)
        except (ValueError, LookupError, TypeError):  # not the JSON of a verdict
            yield replace(failed_row(step, name, result), agrees=False)


def verified_row(step: str, name: str, settings: Sequence[str], result: ChildResult) -> ProofRow:
    """Returns the row of a verification: verdict, largest r, sensitivity, and the first difference's sentence."""
    if result.late or result.status not in (SAME, DIFFERENT, NOTHING_PROVEN):
        row = failed_row(step, name, result)
        if row.state == "look" or result.status != REFUSED:
            return replace(row, agrees=None if row.state == "look" else False)
        return replace(row, sentence=f"refused: {result.cause}", state="look", seconds=0.0)
    verdict = json.loads(result.stdout)
    comparisons = [verdict[key] for key in ("float64", "own") if verdict[key] is not None]
    numbers = [row["r"] for comparison in comparisons for row in comparison["rows"].values()]
    numbers += [verdict["weights"]["r"], *(each["r"] for each in verdict["steps"])]
    largest = max(float(number) for number in numbers)
    visible = {comparison["dtype"]: comparison["visible"] for comparison in comparisons}
    difference = None if verdict["where"] is None else verdict["where"]["sentence"]
    sentence = f"{verdict['verdict']}, largest r {largest:.2g}, {result.seconds:.1f} s"
    if result.status != SAME:
        sentence = f"{sentence}: {difference or verdict['sentences'][-1]}"
    outcomes = {SAME: ("ok", True), DIFFERENT: ("mend", False), NOTHING_PROVEN: ("look", None)}
    state, agrees = outcomes[result.status]
    return ProofRow(
        step=step, name=name, sentence=sentence, state=state, agrees=agrees, seconds=result.seconds,  # type: ignore[arg-type]
        values={
            "settings": list(settings), "verdict": verdict["verdict"], "status": result.status,
            "largest_r": largest if math.isfinite(largest) else str(largest), "allowed_r": verdict["allowed"],
            "sensitivity": visible, "first_difference": difference,
        },
    )  # fmt: skip


def speed(bench: Bench) -> Iterator[ProofRow]:
    """Yields a row for the trainer's step and a bare loop, and for samples per second on one rank and on all."""
    sizes = speed_sizes(bench)
    arguments = ("strategy.use=single", f"train.batch={BATCH}", "callbacks=[]", *sizes)
    result = bench.child(MEASUREMENTS, "speed", "speed.json", RECIPE, *arguments, OMP_NUM_THREADS="1")
    if result.status:
        yield failed_row("speed", "a step on 1 rank", result)
    else:
        report = _report(bench, "speed.json")
        ratio, seconds = report["ratio"], report["seconds_per_step"]
        yield ProofRow(
            step="speed", name="a step on 1 rank", seconds=result.seconds, values=report,
            sentence=f"trainer {duration(seconds['trainer'])}, bare loop {duration(seconds['bare'])}, ratio "
            f"{ratio['median']:.3f} (of pairs: {ratio['min']:.3f} to {ratio['max']:.3f})",
        )  # fmt: skip
    rates: dict[int, float] = {}
    for ranks in dict.fromkeys((1, bench.ranks)):
        arguments = (*speed_settings(bench, ranks), "--out", f"speed-{ranks}")
        result = bench.verb("train", RECIPE, "--ranks", str(ranks), *arguments)
        if result.status:
            yield failed_row("speed", plural(ranks, "rank"), result)
            return
        rates[ranks] = statistics.median(row["samples_per_second"] for row in step_events(bench, ranks))
    ratio = rates[bench.ranks] / rates[1]
    listed = ", ".join(f"{rate:.4g} on {plural(ranks, 'rank')}" for ranks, rate in rates.items())
    yield ProofRow(
        step="speed", name="samples per second", sentence=f"{listed}, ratio {ratio:.2f} ({BATCH} samples a rank)",
        values={"by_ranks": rates, "ratio": ratio, "samples_of_a_rank": BATCH, "settings": sizes},
    )  # fmt: skip


def speed_sizes(bench: Bench) -> list[str]:
    return ["train.micro_batches=1", *(() if bench.is_cpu else DEVICE_SIZES)]


def speed_settings(bench: Bench, ranks: int) -> list[str]:
    """Returns the settings of the training whose speed is measured."""
    batch = BATCH * ranks
    return [
        "strategy.use=data_parallel", f"train.batch={batch}", f"train.length={SPEED_STEPS} steps",
        f"dataset.samples={max(256, 4 * batch)}", f"callbacks=[{{use: metrics, every: {READ_EVERY} steps}}]",
        *speed_sizes(bench),
    ]  # fmt: skip


def step_events(bench: Bench, ranks: int) -> list[dict[str, Any]]:
    """Returns the readings of the training on `ranks` ranks, without the first, in which kernels are chosen."""
    lines = (bench.folder / f"speed-{ranks}" / "metrics.jsonl").read_text().splitlines()
    events = map(json.loads, lines)
    return [event for event in events if event["event"] == "step" and event["step"] > READ_EVERY]


def memory(bench: Bench) -> Iterator[ProofRow]:
    """Yields the row of the bytes that `check` foretells for the speed step's training, and of the device's."""
    arguments = [*speed_settings(bench, bench.ranks), f"train.device={'cpu' if bench.is_cpu else 'auto'}"]
    result = bench.verb("check", RECIPE, "--ranks", str(bench.ranks), "--no-run", *arguments)
    match = re.search(r": (\S+) (bytes|[kMGT]B) in all$", result.stdout, re.MULTILINE)
    if result.status or match is None:
        yield failed_row("memory", "memory", result)
        return
    forecast = float(match[1]) * UNITS[match[2]]
    measured = None if bench.is_cpu else max(event["memory"] for event in step_events(bench, bench.ranks))
    measurement = "on CPUs not measured" if measured is None else f"the device had {amount(measured)}"
    yield ProofRow(
        step="memory", name="memory", sentence=f"data_parallel: check foretells {amount(forecast)}; {measurement}",
        seconds=result.seconds, values={"forecast": forecast, "measured": measured},
    )  # fmt: skip


def resume(bench: Bench) -> Iterator[ProofRow]:
    """Yields the row of a training whose last rank is killed after a checkpoint, and that is then resumed."""
    results = _train(bench, "whole"), _train(bench, "killed", kill=True), _train(bench, "killed", "--resume")
    seconds = sum(result.seconds for result in results)
    for result, is_killed in zip(results, (False, True, False), strict=True):
        if is_killed and not result.status:
            sentence = "the rank was to be killed, and the training went on"
            yield ProofRow(step="resume", name="resume", sentence=sentence, state="mend", seconds=seconds)
            return
        if result.late or (result.status and not is_killed):
            yield failed_row("resume", "resume", result)
            return
    uninterrupted, resumed = (_certificate(bench, name) for name in ("whole", "killed"))
    before, after = last_digests(uninterrupted), last_digests(resumed)
    values = {"from": resumed["from"], "uninterrupted": before, "resumed": after}
    same = before == after and resumed["from"] > 0
    row = ProofRow(
        step="resume", name="resume", agrees=same, state="ok" if same else "mend", seconds=seconds, values=values,
        sentence=f"killed after step {KILL_AT}, resumed from step {resumed['from']}: "
        + ("the same bits" if same else "other bits") + " as without the end",
    )  # fmt: skip
    yield row if same else _controlled(bench, row)


def _controlled(bench: Bench, row: ProofRow) -> ProofRow:
    """Returns the row, or, if two uninterrupted trainings differ, too, one that says that nothing is proven."""
    shutil.move(bench.folder / "whole", bench.folder / "first")
    again = _train(bench, "whole")
    if again.status or last_digests(_certificate(bench, "whole")) == row.values["uninterrupted"]:
        return row
    reason = "two uninterrupted trainings differ, too: kernels of this device change their order"
    return replace(row, agrees=None, sentence=f"other bits, but {reason}", state="look")


def _train(bench: Bench, name: str, *arguments: str, kill: bool = False) -> ChildResult:
    killer = f", {{use: {MEASUREMENTS}.KillRank, step: {KILL_AT}}}" * kill
    settings = [
        "strategy.use=data_parallel", f"train.length={RESUME_STEPS} steps", "train.batch=16",
        f"callbacks=[{{use: checkpoint, every: {SAVE_EVERY} steps}}{killer}]",
    ]  # fmt: skip
    ranks = ("--ranks", str(bench.ranks), "--out", name)
    return bench.verb("train", RECIPE, *settings, *ranks, *arguments, **DETERMINISTIC)


def last_digests(attempt: dict[str, Any]) -> dict[str, Any]:
    """Returns the step of the attempt's last checkpoint, and its digests of model and optimizer."""
    saved = attempt["saved"][-1]
    return {"step": saved["step"], "model": saved["model"], "optimizer": saved["optimizer"]}


def _certificate(bench: Bench, name: str) -> dict[str, Any]:
    """Returns the last attempt of the run's certificate."""
    attempt: dict[str, Any] = _report(bench, f"{name}/certificate.json")["attempts"][-1]
    return attempt


def _report(bench: Bench, name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((bench.folder / name).read_text("utf-8"))
    return report


STEPS: dict[str, ProveStep] = {
    "machine": ProveStep(machine, 2), "exchange": ProveStep(exchange, 4), "layouts": ProveStep(layouts, 52),
    "precision": ProveStep(precision, 14), "speed": ProveStep(speed, 14), "memory": ProveStep(memory, 2),
    "resume": ProveStep(resume, 12),
}  # fmt: skip
