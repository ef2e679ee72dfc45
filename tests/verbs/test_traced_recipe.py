"""A recipe whose model or samples cannot be counted gets the reason as a sentence, from each command that counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.plan.devices import DEVICES
from paddle_dp.plan.traced_model import TracedModel
from paddle_dp.recipe import read_recipe
from paddle_dp.verbs.check_screen import forecast
from paddle_dp.verbs.forecast import blocks_of
from paddle_dp.verbs.layout_plan import RecipePlan

PARTS = """
import numpy as np
from paddle import nn

class Samples:
    def __init__(self, split): pass
    def __len__(self): return 64
    def __getitem__(self, index): return np.ones(4, "float32"), index % 3

class Counted(Samples):
    def __init__(self, split): self.count = range(split)

class Heads(nn.Layer):
    def __init__(self, heads: int = 2):
        super().__init__()
        self.layer = nn.Linear(4, 3 * heads)
    def forward(self, x): return self.layer(x)

class Wide(Heads):
    def forward(self, x): return self.layer(x @ x)

class Normed(nn.Layer):
    def __init__(self):
        super().__init__()
        self.layer = nn.utils.weight_norm(nn.Linear(4, 3))
    def forward(self, x): return self.layer(x)

class Recurrent(nn.Layer):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 3)
    def forward(self, x): return self.layer(x.unsqueeze(1))[0].mean(1)
"""


@pytest.fixture(autouse=True)
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts, as an installed module."""
    (tmp_path / "counted_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "counted_parts", raising=False)


def recipe_of(folder: Path, model: str, dataset: str = "Samples") -> Path:
    file = folder / "recipe.yaml"
    file.write_text(
        f"model: {{use: counted_parts.{model}}}\ndataset: {{use: counted_parts.{dataset}}}\n"
        "loss: {use: cross_entropy}\noptimizer: {use: adamw}\n"
        "schedule: {use: constant, learning_rate: 1.0e-3}\nstrategy: {use: data_parallel}\n"
        "train: {length: 8 steps, batch: 32}\ncallbacks: []\n"
    )
    return file


def plan_of(file: Path) -> RecipePlan:
    return RecipePlan.make(file, (), [2], DEVICES["a100-80"])


def test_a_model_with_heads_that_is_no_transformer_is_planned(tmp_path: Path) -> None:
    """It was refused as one that is no transformer."""
    model = plan_of(recipe_of(tmp_path, "Heads")).planner.model
    assert isinstance(model, TracedModel) and model.flops == 2 * 2 * 4 * 6


@pytest.mark.parametrize("model", ["Normed", "Recurrent"])
def test_a_model_that_computes_with_its_weights_while_it_is_built_is_refused(
    model: str, tmp_path: Path
) -> None:
    """`plan`, `check --ranks` and train.micro_batches=auto ended with Paddle's traceback."""
    file = recipe_of(tmp_path, model)
    with pytest.raises(UsageError, match=f"counted_parts.{model} cannot be built without memory"):
        plan_of(file)
    with pytest.raises(UsageError, match="cannot be built without memory"):
        [*forecast(read_recipe(file), 2)]
    with pytest.raises(UsageError, match="cannot be built without memory"):
        blocks_of(read_recipe(file))


def test_an_error_in_a_data_set_is_named(tmp_path: Path) -> None:
    """Of other errors than those of files it was a traceback."""
    with pytest.raises(UsageError, match=r"the first sample, .*cannot be read: TypeError: 'str' object"):
        plan_of(recipe_of(tmp_path, "Heads", "Counted"))


def test_what_paddle_says_of_a_forward_is_below_its_traceback(tmp_path: Path) -> None:
    """The sentence ended with "In transformed code:"."""
    with pytest.raises(UsageError, match=r"cannot trace its forward: \w+: (?!In transformed).*\w+"):
        plan_of(recipe_of(tmp_path, "Wide"))
