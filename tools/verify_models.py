"""`paddle-dp verify` on models that others wrote, as they come, with synchronised BatchNorm: a table, a page.

python tools/verify_models.py                                    # paddle.vision.models: hours on two cores
python tools/verify_models.py --only resnet18 vgg11 --limit 600  # these, for 600 seconds each at most
python tools/verify_models.py --from FOLDER                      # those of tools/foreign_models.yaml that FOLDER holds
python tools/verify_models.py --rows tools/verified_models.jsonl --page   # docs/verified_models.md and README's line

FOLDER is a checkout or a folder of installed packages, such as site-packages, which its user has fetched.
With --rows, models that are in the file are not run again (but for those of --only), so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from paddle_dp.launch.scratch import scratch_folder  # noqa: E402
from paddle_dp.launch.silence import import_paddle  # noqa: E402
from paddle_dp.proof.report import number  # noqa: E402

VISION = "paddle.vision.models"
FOREIGN = ROOT / "tools" / "foreign_models.yaml"
# Models of paddle.vision that need another size than 64 pixels: they flatten or pool more than a smaller one leaves.
PIXELS = {"alexnet": 224, "googlenet": 224, "inception_v3": 96, "LeNet": 28}
CHANNELS = {"LeNet": 1}
LOSSES = {"googlenet": "tools.verify_models.three_outputs"}
WITHOUT_FUNCTION = ("LeNet",)  # classes that no function makes
BY_NATURE = "Differs by nature: "  # the beginning of verify's sentence on a model that is not one process's
CLASSES, BATCH, STEPS, TOKENS = 10, 8, 8, 16
STEPS_OF_FOREIGN = 4
HEAD = (
    "| model | layout | inputs | parameters | verdict | r in float64 | r in float32 | steps | seconds | memory |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
PAGE = """\
# Verified models

> {claim}

Every one as it comes, with dropout where it has any, {batch} samples in a batch, on random pictures of {classes}
classes or random tokens: momentum 0.9, weight decay 1e-4, two steps in float64 and {vision} in float32 ({foreign} of
models of other packages; [proof.md](proof.md)), the last batch cut so that two ranks cannot share it equally. *data 2*
is `strategy: {{use: data_parallel, sync_batch_norm: true}}` on two ranks, the others are axes of `hybrid`. GoogLeNet,
which answers three times, has a loss of its own in the tool. Where the verdict is *different, and named*, verify says
why: such a model draws random numbers itself, each rank its own ([dropout.md](dropout.md)). The code of other packages
is not kept here: FOLDER is a checkout, or a folder of installed packages.
[foreign_models.yaml](../tools/foreign_models.yaml) has their list, with sizes, cuts and blocks. This page and the line
on the READMEs are written by their tool:

    python tools/verify_models.py --rows tools/verified_models.jsonl [--from FOLDER]
    python tools/verify_models.py --rows tools/verified_models.jsonl --page

`r`: the largest distance of a quantity (a gradient, an update, a statistic …) in units of one process's own noise, 8 at
most where it is the same; *steps*: that of losses and gradient norms over the steps. *memory*: of the largest
process. *seconds*: of both sides and the comparison, on 2 cores of a CPU that others used, too. Paddle {paddle}.

{tables}
"""


def three_outputs(outputs: Any, targets: Any) -> Any:
    """GoogLeNet's loss, one number for each sample: of its answer, and 0.3 of those of its two heads on the way."""
    import paddle.nn.functional as F

    last, *others = (F.cross_entropy(one, targets, reduction="none").reshape([-1]) for one in outputs)
    return last + 0.3 * sum(others)


def backbone(name: str, **settings: Any) -> Any:
    """A model of PaddleClas, whose constructors write to a logger that its trainer makes."""
    import logging

    import_module("ppcls.utils.logger").init_logger(log_level=logging.ERROR)
    return getattr(import_module("ppcls.arch.backbone"), name)(**settings)


def language_model(package: str, name: str, sizes: dict[str, Any]) -> Any:
    """A model of PaddleFormers or PaddleNLP with new weights, in its config's sizes; its outputs are its scores."""
    kind = getattr(import_module(f"{package}.transformers"), name)

    def forward(model: Any, tokens: Any) -> Any:
        return kind.forward(model, tokens, return_dict=True).logits

    return type(name, (kind,), {"forward": forward})(kind.config_class(**sizes))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model in a layout. `family`: the package that holds it."""

    family: str = VISION
    model: str
    layout: str = "data 2"
    inputs: str

    @property
    def key(self) -> str:
        return f"{self.family} {self.model} {self.layout}"


@dataclass(frozen=True, kw_only=True)
class Case(Subject):
    """What is to be verified, by this `recipe`."""

    recipe: dict[str, Any] = field(hash=False)
    steps: int = STEPS


@dataclass(frozen=True, kw_only=True)
class Row(Subject):
    """One model's line; numbers are 0 and texts empty if it was not compared."""

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
        cells = [self.model, self.layout, self.inputs, size, self.verdict, self.wide, self.own, self.steps]
        return "| " + " | ".join([*cells, f"{self.seconds:.0f}", memory]) + " |"


def names() -> list[str]:
    """The functions of paddle.vision.models that make a model, and the classes that have none."""
    import_paddle()
    from paddle.vision import models

    return [n for n in models.__all__ if not inspect.isclass(getattr(models, n)) or n in WITHOUT_FUNCTION]


def vision_cases() -> list[Case]:
    """Those of Paddle itself."""
    cases = []
    for name in names():
        model = {"use": f"{VISION}.{name}", "num_classes": CLASSES}
        images = _images(PIXELS.get(name, 64), STEPS, CHANNELS.get(name, 3))
        recipe = _recipe(model, images, LOSSES.get(name, "cross_entropy"))
        cases.append(Case(family=VISION, model=name, inputs=f"{PIXELS.get(name, 64)} px", recipe=recipe))
    return cases


def foreign_cases() -> list[Case]:
    """Those of tools/foreign_models.yaml."""
    families = _foreign()
    return [
        case
        for family, facts in families.items()
        for name, settings in facts["models"].items()
        for case in _of_foreign(family, facts["package"], name, settings)
    ]


def _foreign() -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load(FOREIGN)
    return found


def packages() -> dict[str, str]:
    """By family of tools/foreign_models.yaml, the folder that its package is."""
    return {family: facts["package"] for family, facts in _foreign().items()}


def _of_foreign(family: str, package: str, name: str, settings: Mapping[str, Any]) -> Iterator[Case]:
    steps = STEPS_OF_FOREIGN
    if "sizes" in settings:
        model: dict[str, Any] = {"use": "verify_models.language_model", "package": package, "name": name}
        model["sizes"] = settings["sizes"]
        inputs, loss = f"{TOKENS} tokens", "cross_entropy"
        data = {"use": "random_tokens", "vocab": settings["sizes"]["vocab_size"] - 1, "length": TOKENS}
        data |= {"samples": BATCH * steps, "test_samples": BATCH}
    else:
        pixels = settings.get("pixels", 64)
        model = {"use": "verify_models.backbone", "name": name, "class_num": CLASSES}
        model |= settings.get("settings", {})
        inputs, loss, data = f"{pixels} px", "cross_entropy", _images(pixels, steps)
    for layout, tables in settings.get("layouts", {"data 2": {}}).items():
        recipe = _recipe({**model, **tables}, data, settings.get("loss", loss))
        if layout != "data 2":
            axis, degree = layout.split()
            recipe["strategy"] = {"use": "hybrid", axis: int(degree)}
        yield Case(family=family, model=name, layout=layout, inputs=inputs, recipe=recipe, steps=steps)


def _images(pixels: int, steps: int, channels: int = 3) -> dict[str, Any]:
    sizes = {"shape": [channels, pixels, pixels], "classes": CLASSES}
    return {"use": "random_images", **sizes, "samples": BATCH * steps, "test_samples": BATCH}


def _recipe(model: dict[str, Any], dataset: dict[str, Any], loss: str) -> dict[str, Any]:
    return {
        "model": model,
        "dataset": dataset,
        "loss": {"use": loss},
        "optimizer": {"use": "momentum", "momentum": 0.9, "weight_decay": 1.0e-4},
        "schedule": {"use": "constant", "learning_rate": 0.01},
        "strategy": {"use": "data_parallel", "sync_batch_norm": True},
        "train": {"length": "1 epoch", "batch": BATCH, "seed": 0},
    }


def verified(case: Case, scratch: Path, limit: float, folder: Path | None = None) -> Row:
    """Runs `paddle-dp verify` for one model, whose package is in `folder`."""
    import paddle

    path, begun = scratch / f"{re.sub(r'[^A-Za-z0-9]+', '_', case.key)}.yaml", time.perf_counter()
    path.write_text(json.dumps(case.recipe, indent=1))  # which is YAML, too
    command = [sys.executable, "-m", "paddle_dp", "verify", str(path), "--ranks", "2", "--json"]
    # By its own name: a checkout may have a package `tools`, which would hide this folder.
    paths = [str(ROOT / "tools"), str(folder.resolve()) if folder else "", os.environ.get("PYTHONPATH", "")]
    job = subprocess.Popen(
        [*command, "--steps", str(case.steps)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    late = ""
    try:
        said, errors = job.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        job.terminate()  # it ends its ranks and removes its files
        said, errors, late = *job.communicate(), f"not within {limit:.0f} s"
    facts: dict[str, Any] = {"family": case.family, "model": case.model, "layout": case.layout}
    facts |= {"inputs": case.inputs, "seconds": time.perf_counter() - begun, "paddle": paddle.__version__}
    if late or job.returncode not in (0, 1, 3) or "{" not in said:
        why = [line for line in errors.splitlines() if line and not line.startswith("running ")]
        return Row(verdict=late or f"not compared: {' '.join(why)[-400:]}".replace("|", "\\|"), **facts)
    return Row(**facts, **told(json.loads(said[said.index("{\n") :])))


def told(found: dict[str, Any]) -> dict[str, Any]:
    """What goes into a row of the JSON object that verify prints."""
    wide, own = (
        number(max(float(row["r"]) for row in each["rows"].values())) if each else "not compared"
        for each in (found["float64"], found["own"])
    )
    where = found["where"]["sentence"] if found["where"] else found["sentences"][-1]
    named = [s.removeprefix(BY_NATURE) for s in found["sentences"] if s.startswith(BY_NATURE)]
    verdict = f"{found['verdict']}, and named: {named[0]}" if named else f"**{found['verdict']}**: {where}"
    return {
        "verdict": "same" if found["verdict"] == "same" else verdict,
        "parameters": found["parameters"],
        "wide": wide,
        "own": own,
        "steps": number(max(float(step["r"]) for step in found["steps"])),
        "memory": max(found["memory"].values()),
    }


def claims(rows: Iterable[Row]) -> tuple[str, str]:
    """The line of the page and of README.md, and of README_zh.md: by family, how many of its models are the same in
    every layout."""
    verdicts: dict[str, dict[str, bool]] = {}
    for row in rows:
        of_model = verdicts.setdefault(row.family, {})
        of_model[row.model] = of_model.get(row.model, True) and row.verdict == "same"
    counts = [(family, sum(models.values()), len(models)) for family, models in sorted(verdicts.items())]
    english = ", ".join(f"{same} of {tried} models of {family}" for family, same, tried in counts)
    chinese = "，".join(f"{family} {same}/{tried}" for family, same, tried in counts)
    return f"{english} are SAME on two ranks", f"两个 rank 下与单进程一致的模型：{chinese}"


def page(rows: Mapping[str, Row], cases: Iterable[Case]) -> str:
    """The page of all these rows, in the order of the cases; those that have not been run are named."""
    tables: dict[str, list[str]] = {}
    for case in cases:
        missing = f"| {case.model} | {case.layout} | {case.inputs} | | not run | | | | | |"
        tables.setdefault(case.family, []).append(str(rows.get(case.key, missing)))
    versions = ", ".join(sorted({row.paddle for row in rows.values() if row.paddle}))
    sections = [f"## {family}\n\n{HEAD}\n" + "\n".join(lines) for family, lines in tables.items()]
    return PAGE.format(
        claim=claims(rows.values())[0], batch=BATCH, classes=CLASSES, vision=STEPS, foreign=STEPS_OF_FOREIGN,
        paddle=versions, tables="\n\n".join(sections),
    )  # fmt: skip


def write_pages(rows: Mapping[str, Row]) -> None:
    """Writes docs/verified_models.md, and its first line into both READMEs."""
    (ROOT / "docs" / "verified_models.md").write_text(page(rows, [*vision_cases(), *foreign_cases()]))
    lines = ("README.md", r"> \d+ of \d+ models of"), ("README_zh.md", "> 两个 rank 下与单进程一致的模型：")
    for (name, beginning), line in zip(lines, claims(rows.values()), strict=True):
        text = (ROOT / name).read_text()
        (ROOT / name).write_text(re.sub(rf"^{beginning}.*$", f"> {line}", text, flags=re.M))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="these, run again if need be")
    parser.add_argument(
        "--from", dest="folder", type=Path, metavar="FOLDER", help="the models of other packages there"
    )
    parser.add_argument("--limit", type=float, default=3600, metavar="S", help="seconds for a model (3600)")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="keep rows here, and do not run what it has"
    )
    parser.add_argument("--page", action="store_true", help="write all rows as a page, and run nothing")
    given = parser.parse_args()
    rows = read(given.rows)
    if given.page:
        write_pages(rows)
        return 0
    cases = vision_cases()
    if given.folder is not None:
        there = [family for family, package in packages().items() if (given.folder / package).is_dir()]
        if not there:
            parser.error(f"{given.folder} holds none of the packages {', '.join(packages().values())}")
        cases = [case for case in foreign_cases() if case.family in there]
    unknown = set(given.only or ()) - {case.model for case in cases}
    if unknown:
        known = dict.fromkeys(case.model for case in cases)
        parser.error(f"there is no {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    chosen = [c for c in cases if (c.model in given.only if given.only else c.key not in rows)]
    print(HEAD, flush=True)
    with scratch_folder("paddle-dp-models-") as scratch:
        for case in chosen:
            row = rows[case.key] = verified(case, scratch, given.limit, given.folder)
            print(row, flush=True)
            if given.rows:
                with given.rows.open("a") as kept:
                    kept.write(f"{line(row)}\n")
    return 0 if all(row.verdict == "same" for row in rows.values()) else 1


def line(row: Row) -> str:
    """What --rows keeps of a row."""
    return json.dumps(asdict(row))


def read(kept: Path | None) -> dict[str, Row]:
    """Rows by key; the last one of each counts."""
    if kept is None or not kept.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in kept.read_text().splitlines()]
    return {row.key: row for row in rows}


if __name__ == "__main__":
    sys.exit(main())
