"""A run is evaluated on any number of ranks: with its strategy, or with the whole model on each."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.errors import RecipeError, UsageError
from paddle_dp.launch.command import Job
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.start import evaluation
from tests.house.programs import run_python
from tests.parity import train
from tests.ranks import run_ranks

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def chosen(name: str, *overrides: str, **how: Any) -> tuple[str, int, str]:
    """The strategy and the ranks on this machine without devices, and what is said of them."""
    job = Job(entry_point="evaluate", recipe=CONFIGS / f"{name}.yaml", overrides=overrides, **how)
    with redirect_stderr(io.StringIO()) as said:
        recipe, plan = evaluation(job, Machine(cores=2))
    assert plan.job.all_overrides[: len(overrides)] == overrides
    return recipe.strategy.name, plan.ranks, said.getvalue()


@pytest.mark.parametrize(
    "name", ["digits_parameter_server", "siamese_digits", "gpt_pipeline2", "gpt_tensor2_data2"]
)
def test_one_process_has_the_whole_model_where_the_strategy_needs_more(name: str) -> None:
    strategy, ranks, said = chosen(name, "callbacks=[]")
    assert (strategy, ranks) == ("data_parallel", 1)
    assert said.startswith("evaluated on 1 process with strategy.use=data_parallel")


def test_several_ranks_have_it_too_and_a_strategy_that_takes_them_is_kept() -> None:
    assert chosen("digits_parameter_server", ranks=2) == ("parameter_server", 2, "")
    assert chosen("gpt_tensor2", ranks=2)[::2] == ("hybrid", "")
    strategy, ranks, said = chosen("digits_replicas", ranks=2)
    assert (strategy, ranks) == ("data_parallel", 2) and said.startswith("evaluated on 2 ranks")
    assert chosen("digits_mlp")[::2] == ("data_parallel", "")


def test_what_is_asked_for_is_refused_and_a_mistake_is_shown() -> None:
    with pytest.raises(UsageError, match="leaves no worker on 2 ranks"):
        chosen("digits_parameter_server", "strategy.servers=2", ranks=2)
    with pytest.raises(RecipeError, match="batsh"):
        chosen("digits_parameter_server", "train.batsh=2")
    with pytest.raises(UsageError, match=r"train\.device is gpu"):
        chosen("digits_parameter_server", "train.device=gpu")


def trained(folder: str, strategy: str) -> dict[str, Any]:
    """In every rank: a run's folder, as `paddle-dp train` leaves it."""
    from paddle_dp.mesh import join
    from paddle_dp.recipe import read_recipe, write_recipe

    found = train(folder, strategy, "3 steps")
    if join(seed=3).is_main:
        [path, *_] = Path(folder).glob("recipe-*.yaml")
        more = "callbacks=[{use: timeline}]"  # which one rank would refuse
        write_recipe(read_recipe(path, [f"output_dir={folder}", more]), Path(folder) / "recipe.yaml")
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "strategy", "on"),
    [
        (3, "{use: parameter_server, servers: 2}", 1),
        (3, "{use: parameter_server, servers: 2}", 2),
        (2, "{use: hybrid, pipeline: 2}", 1),
        (2, "{use: hybrid, sharding: 2, sharding_stage: 3}", 1),
    ],
)
def test_the_numbers_are_those_of_the_ranks(ranks: int, strategy: str, on: int, tmp_path: Path) -> None:
    found = run_ranks(trained, ranks, str(tmp_path), strategy)[0]
    more = ["--ranks", str(on)] if on > 1 else []
    done = run_python("-m", "paddle_dp", "evaluate", tmp_path, *more, timeout=120)
    assert "with strategy.use=data_parallel" in done.stderr
    numbers = json.loads((tmp_path / "evaluation.json").read_text())
    assert numbers["samples"] == found["samples"]
    assert {n: numbers[n] for n in found["held_out"]} == pytest.approx(found["held_out"], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("verb", ["export", "predict"])
def test_a_callback_that_needs_ranks_is_none_of_an_answer_s(verb: str, tmp_path: Path) -> None:
    run_ranks(trained, 2, str(tmp_path), "{use: hybrid, pipeline: 2}")
    words = [verb, str(tmp_path)]
    if verb == "predict":
        import numpy as np

        np.save(tmp_path / "tokens.npy", np.arange(16) % 32)
        words.append(str(tmp_path / "tokens.npy"))
    run_python("-m", "paddle_dp", *words, timeout=120)
