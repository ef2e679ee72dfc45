"""The table of models that others wrote: each has a recipe, and what verify said becomes its line."""

import json
from pathlib import Path

import pytest

from paddle_dp.recipe import read_recipe
from tools import verify_models
from tools.verify_models import Case, Row

ROOT = Path(__file__).resolve().parents[2]
FOUND = {
    "verdict": "same", "where": None, "sentences": ["SAME: …"], "parameters": 11_200_000,
    "float64": {"rows": {"gradient": {"r": 0.5}, "update": {"r": 1.25}}},
    "own": {"rows": {"gradient": {"r": 0.8}}},
    "steps": [{"r": 0.1}, {"r": 2.0}], "memory": {"one": 2**30, "many": 2**29},
}  # fmt: skip


def row(model="resnet18", **facts):
    return Row(**{"model": model, "inputs": "64 px", "verdict": "same", "seconds": 61.0, **facts})


def case(model="resnet18", **facts):
    return Case(**{"family": verify_models.VISION, "model": model, "inputs": "64 px", "recipe": {}, **facts})


def test_every_constructor_is_in_it():
    names = verify_models.names()
    assert {"resnet18", "vgg19", "mobilenet_v3_small", "googlenet", "LeNet"} <= set(names)
    assert "ResNet" not in names and len(names) == len(set(names)) > 35


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "LeNet"])
def test_each_has_a_recipe_that_can_be_read(tmp_path, name):
    (mine,) = [one for one in verify_models.vision_cases() if one.model == name]
    path = tmp_path / "model.yaml"
    path.write_text(json.dumps(mine.recipe))
    recipe = read_recipe(path)
    assert recipe.strategy.config.sync_batch_norm
    assert recipe.train.batch * verify_models.STEPS == recipe.dataset.config.samples


def test_the_list_of_other_packages_has_recipes_but_for_their_code(tmp_path, monkeypatch):
    """Forty backbones at least, and the language models in the layouts that their tables give."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    cases = verify_models.foreign_cases()
    assert sum(one.family == "PaddleClas" for one in cases) >= 40
    assert len({one.key for one in cases}) == len(cases)
    layouts = {(one.family, one.model): one.layout for one in cases if one.layout != "data 2"}
    assert {"PaddleFormers", "PaddleNLP"} <= {family for family, _ in layouts}
    for one in cases[:1] + [c for c in cases if c.layout != "data 2"]:
        path = tmp_path / "model.yaml"
        path.write_text(json.dumps(one.recipe))
        recipe = read_recipe(path)  # the packages are not imported before the model is built
        assert recipe.train.batch * verify_models.STEPS_OF_FOREIGN == recipe.dataset.config.samples


def test_a_verdict_becomes_a_line():
    line = str(row(**verify_models.told(FOUND)))
    assert line == "| resnet18 | data 2 | 64 px | 11.2 M | same | 1.2 | 0.8 | 2 | 61 | 1.0 GB |"


def test_a_difference_says_where_and_what_was_not_finite_is_no_number():
    broken = FOUND | {"verdict": "different", "where": {"sentence": "step 1: …"}, "float64": None}
    broken |= {"own": {"rows": {"gradient": {"r": "inf"}}}}
    told = verify_models.told(broken)
    assert told["verdict"] == "**different**: step 1: …"
    assert (told["wide"], told["own"]) == ("not compared", "inf")


def test_a_difference_that_verify_explains_is_told_with_the_reason():
    named = FOUND | {"verdict": "different", "where": {"sentence": "step 1: …"}}
    named |= {"sentences": ["Differs by nature: the model draws.", "DIFFERENT: …"]}
    assert verify_models.told(named)["verdict"] == "different, and named: the model draws."


def test_the_page_has_every_model_and_counts_those_that_are_the_same_in_every_layout(tmp_path):
    kept = tmp_path / "rows.jsonl"
    mine = {"family": "PaddleNLP", "inputs": "16 tokens", "paddle": "3.3.1"}
    lines = [
        row(paddle="3.3.1", verdict="**different**: …"),
        row(paddle="3.3.1"),
        row("vgg11", verdict="not within 9 s"),
        row("Llama", layout="data 2", **mine),
        row("Llama", layout="tensor 2", **(mine | {"verdict": "**different**: …"})),
    ]
    kept.write_text("".join(f"{verify_models.line(one)}\n" for one in lines))
    rows = verify_models.read(kept)
    cases = [case(), case("vgg11"), case("vgg13"), case("Llama", family="PaddleNLP", inputs="16 tokens")]
    page = verify_models.page(rows, cases)
    assert "> 0 of 1 models of PaddleNLP, 1 of 2 models of paddle.vision.models are SAME" in page
    assert "| vgg11 | data 2 | 64 px |  | not within 9 s |" in page
    assert "| vgg13 | data 2 | 64 px | | not run |" in page
    assert "## PaddleNLP" in page and "| Llama | data 2 | 16 tokens |" in page


def test_the_page_and_the_readmes_are_what_the_kept_rows_say():
    """No number of theirs is written by hand: tools/verify_models.py --page."""
    rows = verify_models.read(ROOT / "tools" / "verified_models.jsonl")
    written = (ROOT / "docs" / "verified_models.md").read_text()
    assert written == verify_models.page(
        rows, [*verify_models.vision_cases(), *verify_models.foreign_cases()]
    )
    for readme, line in zip(("README.md", "README_zh.md"), verify_models.claims(rows.values()), strict=True):
        assert f"> {line}\n" in (ROOT / readme).read_text(), readme
