"""Measures what failures cost: one model, one schedule of kills, and several systems that go on after them.

    python tools/benchmark/recovery.py                                    # paddle_dp alone
    python tools/benchmark/recovery.py --torch ~/torch/bin/python          # torchrun, and torchft if it is there, too
    python tools/benchmark/recovery.py --every "60 s,30 s,15 s" --kinds rank,supervisor,node --steps 4800
    python tools/benchmark/recovery.py --systems paddle_dp --ours "in memory=--ranks 2 --restarts 9 KEY=VALUE"

Two ranks train a perceptron of 85 thousand weights over gloo, from a file of samples. In a forward they sleep for each
sample, so that a step takes --step: the time of an accelerator, which needs no core. Every system saves a checkpoint
each --save-every; torchft takes the weights of a living replica. A process is ended by SIGKILL each --every of
training, by the same draws for all systems, until 85 % of the updates are done. That time counts from the first update,
and anew from the first one after a kill: a system that takes long to go on is not spared kills by that.

rank        one of the ranks
supervisor  `paddle-dp` or torchrun, and after half a second what is left of its processes, as systemd does
node        all processes of a node at once

Supervisors and nodes are started again at once with the same command (`--resume` for paddle_dp on one node), as an
engine does. torchft's replicas are a node each; one node has both ranks else.

goodput: the samples that count in the end, times the seconds that the system's own undisturbed step takes for a sample,
over the seconds from the first update to the last. "by updates" counts an update as one although a replica was missing.
A sample is lost if the undisturbed run learned from it in that epoch and this run did not; twice, the other way round.
Weights at the end are compared with those of an undisturbed run of the same system, which does not sleep.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_dp.units import Duration, EverySteps, Quantity
from tools.benchmark.recovery_table import Line, Row, counting, distance, row, samples_by_step, table
from tools.benchmark.recovery_training import RANKS, SAMPLES, Settings, System, Training
from tools.command_line import parser_of, tell, why_no_import

KINDS = ("rank", "supervisor", "node")
SYSTEMS = [
    System("paddle_dp", "paddle_dp", ("--ranks", "2", "--restarts", "9")),
    System("paddle_dp, spares", "paddle_dp", ("--ranks", "2", "--restarts", "9", "--spares")),
    System("paddle_dp, elastic", "paddle_dp", ("--ranks", "1:2", "--restarts", "9")),
    System("torchrun", "torchrun"),
    System("torchft", "torchft"),
]


class Bench:
    """Trains each family undisturbed once, and each system under each schedule."""

    def __init__(self, settings: Settings, folder: Path):
        self.settings, self.folder = settings, folder
        self._references: dict[str, tuple[list[Line], dict[str, np.ndarray]]] = {}

    def measure(self, system: System, every: float) -> Row:
        log, weights = self._reference(system.family)
        folder = self.folder / f"{system.name}, {every:g} s".replace(" ", "_").replace(",", "")
        training = Training(system, self.settings, folder, sleeps=True)
        patience = 300 + 20 * self.settings.steps * self.settings.step  # a busy machine starts ranks slowly
        disturbed = training.run(every, patience)
        return row(
            system.name, every, disturbed, training.kills, samples_by_step(counting(log)),
            SAMPLES // self.settings.batch, distance(_weights(folder), weights),
        )  # fmt: skip

    def _reference(self, family: str) -> tuple[list[Line], dict[str, np.ndarray]]:
        if family not in self._references:
            folder = self.folder / f"{family}-undisturbed"
            system = System(family, family, ("--ranks", "2"))
            log = Training(system, self.settings, folder, sleeps=False).run(0.0, 600.0)
            self._references[family] = log, _weights(folder)
        return self._references[family]


def _weights(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "log" / "weights.npz") as arrays:
        return dict(arrays)


def write_samples(path: Path) -> None:
    """Ten clouds of points; the last of a sample's 65 numbers is its index."""
    draws = np.random.default_rng(0)
    targets = draws.integers(0, 10, SAMPLES)
    points = draws.normal(size=(10, 64))[targets] + draws.normal(scale=2.0, size=(SAMPLES, 64))
    inputs = np.concatenate([points, np.arange(SAMPLES)[:, None]], axis=1)
    np.savez(path, inputs=inputs.astype("float32"), targets=targets.astype("int64"))


def why_not(system: System, torch: str) -> str | None:
    """Why a system cannot be measured, as a sentence; None if it can."""
    modules = {"paddle_dp": "paddle", "torchrun": "torch", "torchft": "torch, torchft"}[system.family]
    python = sys.executable if system.family == "paddle_dp" else torch
    reason = why_no_import(python, modules)
    return f"{python} cannot import {modules}: {reason}" if reason else None


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, in_short=True)
    seconds = partial(_parsed, Duration)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="one that can import torch")
    parser.add_argument("--systems", help="names of rows, separated by ';'")
    parser.add_argument(
        "--ours", action="append", default=[], metavar="NAME=OPTIONS", help="another row: of paddle-dp train"
    )
    parser.add_argument("--every", default="30 s", help="seconds between kills, several separated by commas")
    parser.add_argument("--kinds", default="rank", help=f"in turn: {','.join(KINDS)}")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--step", type=seconds, default="40 ms")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--save-every", type=partial(_parsed, EverySteps), default="20 steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of logs and runs, not to be removed")
    settings = parser.parse_args()
    unknown = set(settings.kinds.split(",")) - set(KINDS)
    if unknown or SAMPLES % settings.batch or settings.batch % RANKS:
        parser.error(
            f"--kinds are {', '.join(KINDS)}, and --batch divides {SAMPLES} and is a multiple of {RANKS}"
        )
    return settings


def _parsed(quantity: type[Quantity], text: str) -> Quantity:
    try:
        parsed: Quantity = quantity.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return parsed


def chosen_systems(given: argparse.Namespace) -> list[System]:
    """The rows that were asked for. Raises SystemExit for an unknown name."""
    added = [entry.partition("=") for entry in given.ours]
    ours = [System(name, "paddle_dp", tuple(shlex.split(options))) for name, _, options in added]
    names = [system.name for system in SYSTEMS] if given.systems is None else given.systems.split(";")
    if unknown := set(names) - {"", *(system.name for system in SYSTEMS)}:
        raise SystemExit(f"--systems: {unknown.pop()!r} is none of {'; '.join(s.name for s in SYSTEMS)}")
    return [*(system for system in SYSTEMS if system.name in names), *ours]


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through every `finally`
    folder = given.keep or Path(tempfile.mkdtemp(prefix="recovery-"))
    folder.mkdir(parents=True, exist_ok=True)
    write_samples(folder / "samples.npz")
    settings = Settings(
        torch=given.torch, data=folder.resolve() / "samples.npz", steps=given.steps, batch=given.batch,
        step=given.step.seconds, save_every=round(given.save_every.count), kinds=given.kinds.split(","),
        seed=given.seed,
    )  # fmt: skip
    bench, rows = Bench(settings, folder.resolve()), []
    try:
        for system in chosen_systems(given):
            if reason := why_not(system, given.torch):
                tell(f"{system.name} is left out: {reason}")
                continue
            for every in given.every.split(","):
                try:
                    rows.append(bench.measure(system, Duration.parse(every).seconds))
                    line = f"{' | '.join(rows[-1].cells())} (load {os.getloadavg()[0]:.1f})"
                except RuntimeError as error:  # the other rows are worth knowing
                    line = f"{system.name}, {every}: {error}"
                tell(line)
    finally:
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
