"""The table of paddle.vision.models: every constructor is in it, and what verify said becomes its line."""

import pytest

from paddle_dp.recipe import read_recipe
from tools import verify_models
from tools.verify_models import Row

FOUND = {
    "verdict": "same", "where": None, "sentences": ["SAME: …"], "parameters": 11_200_000,
    "float64": {"rows": {"gradient": {"r": 0.5}, "update": {"r": 1.25}}},
    "own": {"rows": {"gradient": {"r": 0.8}}},
    "steps": [{"r": 0.1}, {"r": 2.0}], "memory": {"one": 2**30, "many": 2**29},
}  # fmt: skip


def row(model="resnet18", **facts):
    return Row(**{"model": model, "pixels": 64, "batch": 8, "verdict": "same", "seconds": 61.0, **facts})


def test_every_constructor_is_in_it():
    names = verify_models.names()
    assert {"resnet18", "vgg19", "mobilenet_v3_small", "googlenet", "LeNet"} <= set(names)
    assert "ResNet" not in names and len(names) == len(set(names)) > 35


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "LeNet"])
def test_each_has_a_recipe_that_can_be_read(tmp_path, name):
    path = tmp_path / "model.yaml"
    path.write_text(verify_models.recipe(name))
    recipe = read_recipe(path)
    assert recipe.strategy.config.sync_batch_norm
    assert recipe.train.batch * verify_models.STEPS == recipe.dataset.config.samples


def test_a_verdict_becomes_a_line():
    line = str(row(**verify_models.told(FOUND)))
    assert line == "| resnet18 | 64 | 8 | 11.2 M | same | 1.2 | 0.8 | 2 | 61 | 1.0 GB |"


def test_a_difference_says_where_and_what_was_not_finite_is_no_number():
    broken = FOUND | {"verdict": "different", "where": {"sentence": "step 1: …"}, "float64": None}
    broken |= {"own": {"rows": {"gradient": {"r": "inf"}}}}
    told = verify_models.told(broken)
    assert told["verdict"] == "**different**: step 1: …"
    assert (told["wide"], told["own"]) == ("not compared", "inf")


def test_the_page_has_every_model_and_counts_those_that_are_the_same(tmp_path):
    kept = tmp_path / "rows.jsonl"
    lines = [
        row(paddle="3.3.1", verdict="**different**: …"),
        row(paddle="3.3.1"),
        row("vgg11", verdict="not within 9 s"),
    ]
    kept.write_text("".join(f"{verify_models.line(one)}\n" for one in lines))
    page = verify_models.page(verify_models.read(kept).values())
    assert page.count("\n| ") == len(verify_models.names()) + 1  # and the head
    assert "> 1 of 2 models" in page
    assert f"({len(verify_models.names()) - 2} have not been run here)" in page
    assert "| vgg11 | 64 | 8 |  | not within 9 s |" in page
    assert "| vgg13 | 64 | 8 | | not run |" in page
