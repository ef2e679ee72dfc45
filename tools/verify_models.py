"""`paddle-dp verify` on every model of paddle.vision.models, as it comes, with synchronised BatchNorm: a table, a page.

python tools/verify_models.py                                    # all of them: hours on two cores
python tools/verify_models.py --only resnet18 vgg11 --limit 600  # these, for 600 seconds each at most
python tools/verify_models.py --rows rows.jsonl --page docs/verified_models.md

With --rows, models that are in the file are not run again (but for those of --only), so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from paddle_dp.launch.scratch import scratch_folder  # noqa: E402
from paddle_dp.launch.silence import import_paddle  # noqa: E402
from paddle_dp.proof.report import number  # noqa: E402

RECIPE = """\
model: {{use: paddle.vision.models.{name}, num_classes: {classes}}}
dataset:
  use: random_images
  shape: [{channels}, {pixels}, {pixels}]
  classes: {classes}
  samples: {samples}
  test_samples: 8
loss: {{use: {loss}}}
optimizer: {{use: momentum, momentum: 0.9, weight_decay: 1.0e-4}}
schedule: {{use: constant, learning_rate: 0.01}}
strategy: {{use: data_parallel, sync_batch_norm: true}}
train: {{length: 1 epoch, batch: {batch}, seed: 0}}
"""
# Models that need another size than 64 pixels: they flatten or pool more than a smaller picture leaves.
PIXELS = {"alexnet": 224, "googlenet": 224, "inception_v3": 96, "LeNet": 28}
CHANNELS = {"LeNet": 1}
LOSSES = {"googlenet": "tools.verify_models.three_outputs"}
WITHOUT_FUNCTION = ("LeNet",)  # classes that no function makes
CLASSES, BATCH, STEPS = 10, 8, 8
HEAD = (
    "| model | pixels | batch | parameters | verdict | r in float64 | r in float32 | steps | seconds | memory |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
PAGE = """\
# Verified models

> {same} of {run} models of `paddle.vision.models`: two ranks learn what one process learns, to rounding{rest}

Every one as it comes, with dropout where it has any, on random pictures of 10 classes: momentum 0.9, weight
decay 1e-4, `strategy: {{use: data_parallel, sync_batch_norm: true}}`, two steps in float64 and 8 in float32
([proof.md](proof.md)), the last batch cut so that two ranks cannot share it equally. GoogLeNet, which answers three
times, has a loss of its own in the tool. This page is written by its tool:

    python tools/verify_models.py --rows rows.jsonl --page docs/verified_models.md

`r`: the largest distance of a quantity (a gradient, an update, a statistic …) in units of one process's own noise, 8 at
most where it is the same; *steps*: that of losses and gradient norms over the 8 steps. *memory*: of the largest
process. *seconds*: of both sides and the comparison, on 2 cores of a CPU that others used, too. Paddle {paddle}.

{table}
"""


def three_outputs(outputs: Any, targets: Any) -> Any:
    """GoogLeNet's loss, one number for each sample: of its answer, and 0.3 of those of its two heads on the way."""
    import paddle.nn.functional as F

    last, *others = (F.cross_entropy(one, targets, reduction="none").reshape([-1]) for one in outputs)
    return last + 0.3 * sum(others)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model's line; numbers are 0 and texts empty if it was not compared."""

    model: str
    pixels: int
    batch: int
    verdict: str
    seconds: float
    parameters: int = 0
    wide: str = ""
    own: str = ""
    steps: str = ""
    memory: int = 0
    paddle: str = ""

    def __str__(self) -> str:
        size = f"{self.parameters / 1e6:.1f} M" if self.parameters else ""
        memory = f"{self.memory / 2**30:.1f} GB" if self.memory else ""
        cells = [self.model, self.pixels, self.batch, size, self.verdict, self.wide, self.own, self.steps]
        return "| " + " | ".join(map(str, [*cells, f"{self.seconds:.0f}", memory])) + " |"


def names() -> list[str]:
    """The functions of paddle.vision.models that make a model, and the classes that have none."""
    import_paddle()
    from paddle.vision import models

    return [n for n in models.__all__ if not inspect.isclass(getattr(models, n)) or n in WITHOUT_FUNCTION]


def recipe(name: str, batch: int = BATCH) -> str:
    return RECIPE.format(
        name=name,
        classes=CLASSES,
        channels=CHANNELS.get(name, 3),
        pixels=PIXELS.get(name, 64),
        samples=batch * STEPS,
        loss=LOSSES.get(name, "cross_entropy"),
        batch=batch,
    )


def verified(name: str, scratch: Path, limit: float) -> Row:
    """Runs `paddle-dp verify` for one model."""
    import paddle

    path, begun = scratch / f"{name}.yaml", time.perf_counter()
    path.write_text(recipe(name))
    command = [sys.executable, "-m", "paddle_dp", "verify", str(path), "--ranks", "2", "--json"]
    job = subprocess.Popen(
        [*command, "--steps", str(STEPS)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    late = ""
    try:
        said, errors = job.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        job.terminate()  # it ends its ranks and removes its files
        said, errors, late = *job.communicate(), f"not within {limit:.0f} s"
    facts: dict[str, Any] = {"model": name, "pixels": PIXELS.get(name, 64), "batch": BATCH}
    facts |= {"seconds": time.perf_counter() - begun, "paddle": paddle.__version__}
    if late or job.returncode not in (0, 1, 3):
        why = [line for line in errors.splitlines() if line and not line.startswith("running ")]
        return Row(verdict=late or f"not compared: {' '.join(why)}", **facts)
    return Row(**facts, **told(json.loads(said)))


def told(found: dict[str, Any]) -> dict[str, Any]:
    """What goes into a row of the JSON object that verify prints."""
    rs = {
        part: number(max(float(row["r"]) for row in found[part]["rows"].values()))
        if found[part]
        else "not compared"
        for part in ("float64", "own")
    }
    where = found["where"]["sentence"] if found["where"] else found["sentences"][-1]
    return {
        "verdict": "same" if found["verdict"] == "same" else f"**{found['verdict']}**: {where}",
        "parameters": found["parameters"],
        "wide": rs["float64"],
        "own": rs["own"],
        "steps": number(max(float(step["r"]) for step in found["steps"])),
        "memory": max(found["memory"].values()),
    }


def page(rows: Iterable[Row]) -> str:
    """The page of all these rows, in the order of paddle.vision.models."""
    order = names()
    found = sorted(rows, key=lambda row: order.index(row.model))
    missing = [f"| {n} | {PIXELS.get(n, 64)} | {BATCH} | | not run | | | | | |" for n in order]
    lines = {row.model: str(row) for row in found}
    table = "\n".join([HEAD, *(lines.get(n, empty) for n, empty in zip(order, missing, strict=True))])
    same = sum(row.verdict == "same" for row in found)
    versions = ", ".join(sorted({row.paddle for row in found if row.paddle}))
    left = len(order) - len(found)
    rest = f" ({left} have not been run here)" if left else ""
    return PAGE.format(same=same, run=len(found), rest=rest, table=table, paddle=versions)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="these, run again if need be")
    parser.add_argument("--limit", type=float, default=3600, metavar="S", help="seconds for a model (3600)")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="keep rows here, and do not run what it has"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write all rows as a page")
    given = parser.parse_args()
    unknown = set(given.only or ()) - set(names())
    if unknown:
        parser.error(f"paddle.vision.models has no {', '.join(sorted(unknown))}: it has {', '.join(names())}")
    rows = read(given.rows)
    print(HEAD, flush=True)
    with scratch_folder("paddle-dp-models-") as scratch:
        for name in given.only or [n for n in names() if n not in rows]:
            rows[name] = verified(name, scratch, given.limit)
            print(rows[name], flush=True)
            if given.rows:
                with given.rows.open("a") as kept:
                    kept.write(f"{line(rows[name])}\n")
    if given.page:
        given.page.write_text(page(rows.values()))
    return 0 if all(rows[name].verdict == "same" for name in given.only or rows) else 1


def line(row: Row) -> str:
    """What --rows keeps of a row."""
    return json.dumps(asdict(row))


def read(kept: Path | None) -> dict[str, Row]:
    """Rows by model; the last one of each counts."""
    if kept is None or not kept.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in kept.read_text().splitlines()]
    return {row.model: row for row in rows}


if __name__ == "__main__":
    sys.exit(main())
