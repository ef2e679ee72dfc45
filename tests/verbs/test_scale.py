"""What `paddle-dp scale` and `check --memory` say follows from the arithmetic of `check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_dp.cli import main
from paddle_dp.plan.fullest_rank import USABLE_MEMORY
from paddle_dp.recipe import read_recipe
from paddle_dp.text import amount
from paddle_dp.verbs.check_screen import forecast
from paddle_dp.verbs.scale import fits_from

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def fits(name: str, gigabytes: float, *overrides: str) -> str:
    recipe = read_recipe(CONFIGS / f"{name}.yaml", overrides)
    (line,) = fits_from(recipe, gigabytes * 1e9, lambda _: recipe)
    return line


def in_all(name: str, ranks: int, *overrides: str) -> str:
    """The bytes of the fullest rank, as `check --ranks` prints them."""
    lines = forecast(read_recipe(CONFIGS / f"{name}.yaml", overrides), ranks)
    return next(line for line in lines if line.endswith("in all")).split(": ")[-1].removesuffix(" in all")


def test_a_recipe_fits_from_the_first_number_of_ranks_whose_fullest_rank_does() -> None:
    """Each larger one has less, and the bytes are those of `check --ranks`."""
    data = ("strategy.use=data_parallel", "train.batch=64")
    line = fits("gpt_345m", 12, *data)
    ranks = int(line.split(" from ")[1].split()[0])
    assert ranks > 1 and f"the fullest has {in_all('gpt_345m', ranks, *data)}" in line
    assert f"on {line.rpartition('; on ')[2].split()[0]} rank" in line
    roomy = fits("gpt_345m", 400, *data)
    assert " from 1 rank on" in roomy and "; on " not in roomy
    assert amount(USABLE_MEMORY * 12e9) in line


def test_a_recipe_that_fits_nowhere_says_what_to_change() -> None:
    line = fits("gpt_tiny", 1e-4, "strategy.use=data_parallel")
    assert line.startswith("does not fit into") and "strategy.sharding" in line


def test_unknown_activations_are_not_taken_for_none() -> None:
    assert "activations left out" in fits("large_classifier", 1)  # which of its tensors are cut is not known
    assert not any("activations left out" in fits(name, 1) for name in ("gpt_tiny", "digits_mlp"))


def test_memory_is_an_option_of_check(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["check", str(CONFIGS / "gpt_tiny.yaml"), "--no-run", "--memory", "1 GB", "--ranks", "2"])
    shown = capsys.readouterr().out
    assert not end.value.code and "2 ranks: data 2" in shown and "from 1 rank on" in shown
    with pytest.raises(SystemExit) as end:
        main(["check", str(CONFIGS / "gpt_tiny.yaml"), "--no-run", "--memory", "much"])
    assert end.value.code == 2 and "--memory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--link", "quick"), ("--compute", "60 ms"), ("--build", "0")])
def test_memory_alone_takes_no_option_of_ranks(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It left them out, and a mistake in them passed."""
    with pytest.raises(SystemExit) as end:
        main(["check", str(CONFIGS / "gpt_tiny.yaml"), "--no-run", "--memory", "1 GB", *words])
    assert end.value.code == 2 and f"{' '.join(words)} needs --ranks N" in capsys.readouterr().err


def test_a_batch_per_rank_grows_with_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """The batch of one rank was divided among all of them: each had fewer samples than it would train."""
    data = ("strategy.use=data_parallel", "train.micro_batches=1")
    words = ("train.batch=64 per rank", "--memory", "12 MB")
    with pytest.raises(SystemExit) as end:
        main(["check", str(CONFIGS / "gpt_tiny.yaml"), "--no-run", *data, *words])
    shown = capsys.readouterr().out
    assert not end.value.code and "does not fit into" in shown, shown
    assert f"{in_all('gpt_tiny', 1, *data, 'train.batch=64')} on 1" in shown
