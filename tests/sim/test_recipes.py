"""The shipped recipes train on devices, with all their callbacks, and learn there what they learn on the CPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.checks.samplewise import Findings
from tests.house.recipes import small_recipe
from tests.house.runs import events
from tests.house.training import build_trainer
from tests.ranks import run_ranks
from tests.sim.recipes import GPT
from tests.test_configs import RECIPES, SMALLER, ranks_of, train

# Those over files that nobody has here, those whose models take minutes on the host's processor, and one whose numbers
# depend on time.
ELSEWHERE = (
    "digits_async_average", "gpt_345m", "gpt_1_3b", "gpt_6_7b", "llama_7b", "resnet50_imagenet",
    "resnet50_flowers102",
)  # fmt: skip
HERE = [path for path in RECIPES if path.stem not in ELSEWHERE]
TEXTS = ["train.batch=8", "model.width=32"]


def smaller(path: Path, texts: Path) -> list[str]:
    """What makes two steps of a recipe take seconds."""
    if path.stem in SMALLER:
        return SMALLER[path.stem]
    return [*TEXTS, f"dataset.path={texts}"] if "limit:" in path.read_text() else ["train.batch=50"]


def trained(path: Path, folder: Path) -> list[float]:
    """The losses of two steps, on as many ranks as the recipe's header says."""
    texts = folder.with_suffix(".py")
    texts.write_text(Path(__file__).read_text() * 6)
    precision = (
        [] if "precision:" in path.read_text() else ["train.precision=float64"]
    )  # float32 drifts apart by 1e-3
    words = [f"output_dir={folder}", "train.length=2 steps", *precision, *smaller(path, texts)]
    ranks = 1 if path.stem.endswith("_single") else ranks_of(path)
    run_ranks(train, ranks, f"configs/{path.name}", words, timeout=300)
    told = events(folder)
    (last,) = [entry for entry in told if entry.get("event") == "end"]
    assert last["step"] == 2
    return [entry["loss"] for entry in told if "loss" in entry]


@pytest.mark.long
@pytest.mark.parametrize("path", [path for path in HERE if ranks_of(path) <= 4], ids=lambda path: path.stem)
def test_a_recipe_learns_on_the_device_what_it_learns_on_the_cpu(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = trained(path, tmp_path / "device")
    monkeypatch.delenv("CUSTOM_DEVICE_ROOT")
    here = trained(path, tmp_path / "cpu")
    assert here
    np.testing.assert_allclose(there, here, rtol=1e-5)


COMPARES = small_recipe(
    "length: 2 steps, batch: 30", loss="tests.checks.test_samplewise.contrastive", optimizer="sgd",
    strategy="data_parallel", callbacks="[]",
)  # fmt: skip


LOW = ("strategy.pipeline=2", "train.precision={dtype: bfloat16, level: O2}")


def caveats(folder: str) -> list[Any]:
    """In a rank: of each recipe why a training will differ from one process's, what is not known of it, and what the
    trial on a CPU told this rank."""
    from paddle_dp.assembly import sample_trial

    in_process, told = sample_trial.in_process, []
    vars(sample_trial)["in_process"] = lambda *words: told.append(in_process(*words)) or told[-1]
    rows = []
    for recipe, words in ((COMPARES, ()), (GPT, LOW)):
        learner = build_trainer(recipe, folder, *words).learner
        rows.append([[*learner.differences(), *learner.unknown], told[:]])
        told.clear()
    return rows


@pytest.mark.usefixtures("tried")
def test_a_recipe_for_devices_is_tried_on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIM_NAME", "npu")  # Paddle's autocast knows it
    (compares, low), (compares_too, low_too) = run_ranks(caveats, 2, str(tmp_path))
    for (sentence,), _ in (compares, compares_too):
        assert sentence.startswith("the loss contrastive is ")
    assert low == [[], [asdict(Findings())]] and low_too == [[], []]  # one rank has tried it, and all is well
