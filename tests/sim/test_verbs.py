"""What follows a training on the device: evaluate, generate, export and merge give there what they give on the CPU."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from paddle_dp import checkpoint
from tests.house.recipes import small_recipe
from tests.house.runs import events
from tests.ranks import run_ranks

RECIPE = small_recipe(
    "length: 4 steps, batch: 8, micro_batches: 2, seed: 3", optimizer="adamw, clip: 0.5", strategy="hybrid",
    model="gpt, vocab: 256, width: 32, depth: 2, heads: 4, length: 16, dropout: 0.1",
    dataset="text_files, path: TEXT, length: 16, held_out: 0.3", schedule="constant, learning_rate: 3.0e-3",
    callbacks="[{use: evaluate, every: 4 steps}, {use: metrics, every: 1 step}, {use: checkpoint, every: 4 steps}]",
)  # fmt: skip
ALONE = "strategy={use: single}"
WRITING = {"prompt": "def ", "tokens": 12, "temperature": 0.0, "top_k": None, "seed": 0}
DRAWING = {**WRITING, "temperature": 1.0, "top_k": 40}


def verb(name: str, run: str, overrides: Sequence[str], options: dict[str, Any]) -> str:
    """In a rank: what `paddle-dp <name>` of a run does; returns what it printed."""
    from paddle_dp.launch.recipe_rank import work

    words = [f"output_dir={run}/run", *overrides]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        work(name, Path(run) / "recipe.yaml", words, options)
    return said.getvalue()


def trained(folder: Path, layout: str, *overrides: str) -> Path:
    """A folder with the run of four steps on two devices."""
    (folder / "text.py").write_text("def answer(question):\n    return 42 if question else None\n" * 20)
    (folder / "recipe.yaml").write_text(RECIPE.replace("TEXT", str(folder / "text.py")))
    run_ranks(verb, 2, "train", str(folder), [layout, *overrides], {})
    return folder


def numbers(said: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?:loss|acc\d) ([\d.]+)", said)]


def held_out(run: Path) -> list[float]:
    """What the training itself had measured on the held-out samples, at its end."""
    (last,) = events(run / "run", "evaluated")
    return [last[name] for name in ("loss", "acc1", "acc5")]


def merged(run: Path, to: Path) -> tuple[list[int], str]:
    """A weight of the merged file: its shape and type."""
    newest = checkpoint.newest(run / "run" / "checkpoints")
    assert newest is not None
    checkpoint.merge(newest, to)
    with safe_open(to, "numpy") as file:
        weight = file.get_slice("blocks.1.qkv.weight")
        return weight.get_shape(), weight.get_dtype()


def check_verbs(run: Path, layout: str, device: pytest.MonkeyPatch) -> None:
    """Every verb on the device against the CPU, over one run."""
    found: dict[str, list[Any]] = {}
    for _ in ("device", "cpu"):
        answers = {
            "evaluate": numbers(run_ranks(verb, 2, "evaluate", str(run), [layout], {})[0]),
            "evaluate alone": numbers(run_ranks(verb, 1, "evaluate", str(run), [ALONE], {})[0]),
            "generate": run_ranks(verb, 1, "generate", str(run), [ALONE], WRITING)[0],
            "generate, drawn": run_ranks(verb, 1, "generate", str(run), [ALONE], DRAWING)[0],
        }
        for name, answer in answers.items():
            found.setdefault(name, []).append(answer)
        device.delenv("CUSTOM_DEVICE_ROOT", raising=False)
    for name, (there, here) in found.items():
        if name.startswith("evaluate"):
            assert len(there) == 3
            np.testing.assert_allclose(there, here, rtol=1e-5, err_msg=name)
            np.testing.assert_allclose(there, found["evaluate"][0], rtol=1e-5, err_msg=name)
        else:
            assert there == here and there.startswith("def "), name


def test_a_run_of_two_devices_is_evaluated_exported_and_merged(tmp_path: Path) -> None:
    run = trained(tmp_path, "strategy.tensor=2")
    said = run_ranks(verb, 2, "evaluate", str(run), ["strategy.tensor=2"], {})[0]
    np.testing.assert_allclose(numbers(said), held_out(run), rtol=1e-5)
    (exported,) = run_ranks(verb, 1, "export", str(run), [ALONE], {})
    assert re.search(r"program: largest difference \S+ over 8 real samples", exported)
    (written,) = run_ranks(verb, 1, "generate", str(run), [ALONE], WRITING)
    assert written.startswith("def ") and len(written) > len("def \n")
    assert merged(run, tmp_path / "merged.safetensors") == ([32, 96], "F32")


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    ["strategy.tensor=2", "strategy.pipeline=2", "strategy={use: hybrid, sharding: 2, sharding_stage: 3}"],
)
def test_every_verb_gives_on_the_device_what_it_gives_on_the_cpu(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, layout)
    check_verbs(run, layout, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_run_in_bfloat16_is_evaluated_generated_and_exported(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluated in bfloat16 on the device, as in the training; exported in float32, also on the CPU."""
    monkeypatch.setenv("SIM_NAME", "npu")
    low, layout = f"train.precision={{dtype: bfloat16, level: {level}}}", "strategy.tensor=2"
    run = trained(tmp_path, layout, low)
    said = run_ranks(verb, 2, "evaluate", str(run), [layout, low], {})[0]
    np.testing.assert_allclose(numbers(said), held_out(run), rtol=1e-4)
    for place in ("device", "cpu"):
        (exported,) = run_ranks(verb, 1, "export", str(run), [ALONE], {"to": str(tmp_path / place)})
        assert "program: largest difference" in exported
        assert run_ranks(verb, 1, "generate", str(run), [ALONE, low], WRITING)[0].startswith("def ")
        monkeypatch.delenv("CUSTOM_DEVICE_ROOT", raising=False)
    kept = "BF16" if level == "O2" else "F32"
    assert merged(run, tmp_path / "merged.safetensors") == ([32, 96], kept)
