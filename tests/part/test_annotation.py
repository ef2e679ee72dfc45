"""What a recipe says about a model's layers: patterns, their mistakes, and the tables that layers get from them."""

import sys
from pathlib import Path

import paddle
import pytest
from paddle import nn

from paddle_dp.errors import RecipeError
from paddle_dp.part import Annotation, annotate, read_part
from paddle_dp.part.annotation import matching
from paddle_dp.recipe import read_recipe
from paddle_dp.recipe.write import write_recipe

NAMES = ["layer1", "layer1.0", "layer1.0.conv1", "layer1.1", "layer2.0", "fc"]
RESNET = "paddle.vision.models.resnet18"
TEXTS = {
    "encoder.layers.*.self_attn.num_heads": "heads",
    "encoder.layers.*.self_attn.[qkv]_proj": "heads",
    "encoder.layers.*.self_attn.out_proj": "rowwise",
    "encoder.layers.*.linear1": "colwise",
    "encoder.layers.*.dropout": "colwise",
    "encoder.layers.*.linear2": "rowwise",
}


class Texts(nn.Layer):
    """Scores [n, classes] of texts: as somebody writes it who has never heard of ranks."""

    def __init__(
        self, width: int = 16, heads: int = 4, depth: int = 3, classes: int = 5, dropout: float = 0.0
    ):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("layer1", ["layer1"]),
        ("layer1.*", ["layer1.0", "layer1.1"]),
        ("layer[12].0", ["layer1.0", "layer2.0"]),
        ("*.*.conv?", ["layer1.0.conv1"]),
        ("*", ["layer1", "fc"]),
        ("layer1.conv1", []),
    ],
)
def test_a_star_is_one_word_between_dots(pattern, found):
    assert matching(pattern, NAMES) == found


def test_layers_get_the_tables_that_a_prepared_model_has():
    model = annotate(
        Texts(), Annotation(cuts=TEXTS, attention_methods={"encoder.layers.*.self_attn": "forward"})
    )
    layer = model.encoder.layers[2]
    assert layer.cuts == {"linear1": "colwise", "dropout": "colwise", "linear2": "rowwise"}
    assert layer.self_attn.cuts["num_heads"] == "heads" and layer.self_attn.cuts["out_proj"] == "rowwise"
    assert layer.self_attn.attention_methods == ("forward",)
    assert set(model.state_dict()) == set(Texts().state_dict())


@pytest.mark.parametrize(
    ("said", "mistake"),
    [
        ({"cuts": {"encoder.layers.*.linear3": "rowwise"}}, "Did you mean 'linear2'\\? encoder.layers.0 holds"),
        ({"cuts": {"*.layerz": "rowwise"}}, "Did you mean 'layers'\\? encoder holds layers"),
        ({"cuts": {"encodr.layers.*.linear1": "rowwise"}}, "Did you mean 'encoder'\\? Texts holds"),
        ({"cuts": {"encoder.layers.*.norm1": "colwise"}}, "encoder.layers.0.norm1 is a LayerNorm, and colwise"),
        ({"cuts": {"head": "rowwise", "he*": "colwise"}}, "cuts head as colwise, and another pattern as rowwise"),
        ({"cuts": {"encoder.layers.*.self_attn.num_heads": "rowwise"}}, "is a number"),
        ({"cuts": {"encoder.layers.*.self_attn.heads": "heads"}}, "no layer is called"),
        ({"attention_methods": {"encoder.layers.*": "_attend"}}, "Layer, and has no method '_attend'"),
        ({"blocks": [["embed", "encoder.layers.*"]]}, "'head.weight' \\(and 1 more\\) is in none of them. With lists"),
        ({"blocks": ["embed", "encoder.layers", "head"]}, "has no forward: write 'encoder.layers.\\*'"),
        ({"blocks": ["embed", {"use": "paddle.mean", "axes": 1}, "head"]}, "paddle.mean cannot be used"),
        ({"blocks": ["embed", {"use": "paddle.men"}, "head"]}, "paddle.men cannot be used: paddle has no 'men'"),
        ({"blocks": ["embed", {"use": "mean"}]}, "a function in blocks is"),
        ({"blocks": [{"use": "paddle.nn.Linear", "in_features": 2, "out_features": 2}]}, "has weights, which"),
        ({"blocks": [3]}, "3 is no layer's name"),
    ],
)  # fmt: skip
def test_each_mistake_names_its_pattern(said, mistake):
    blocks = tuple(said.pop("blocks", ()))
    with pytest.raises(RecipeError, match=mistake):
        annotate(Texts(), Annotation(**said, blocks=blocks))


def test_a_way_that_there_is_not_has_a_near_miss():
    with pytest.raises(RecipeError, match=r"model.cuts.fc: 'colwse' is not one of .* Did you mean 'colwise'"):
        read_part("models", {"use": RESNET, "cuts": {"fc": "colwse"}})


def test_a_setting_of_the_models_own_stays_its_own(tmp_path: Path, monkeypatch):
    (tmp_path / "own_blocks.py").write_text(
        "from paddle import nn\ndef build(blocks: int = 2): return nn.Sequential(*[nn.Linear(2, 2)] * blocks)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    part = read_part("models", {"use": "own_blocks.build", "blocks": 3})
    assert part.annotation is None and len(part.build()) == 3
    del sys.modules["own_blocks"]


RECIPE = f"""
model:
  use: {RESNET}
  num_classes: 10
  blocks: [[conv1, bn1, relu, maxpool], "layer[1-4].*", [avgpool, {{use: paddle.flatten, start_axis: 1}}, fc]]
  cuts:
    fc: colwise
dataset: {{use: random_images, shape: [3, 32, 32], classes: 10}}
loss: {{use: cross_entropy}}
optimizer: {{use: momentum}}
train: {{length: 1 epoch, batch: 8}}
"""


def test_a_recipe_with_an_annotation_is_written_down_again(tmp_path: Path):
    (tmp_path / "annotated.yaml").write_text(RECIPE)
    recipe = read_recipe(tmp_path / "annotated.yaml")
    write_recipe(recipe, tmp_path / "again.yaml")
    again = read_recipe(tmp_path / "again.yaml").model
    assert again.annotation == recipe.model.annotation and again.settings == recipe.model.settings


def test_a_pattern_that_means_nothing_is_told_with_its_line(tmp_path: Path):
    (tmp_path / "wrong.yaml").write_text(
        RECIPE.replace("fc: colwise", "fcc: colwise").replace("relu", "rellu")
    )
    with pytest.raises(RecipeError) as error:
        read_recipe(tmp_path / "wrong.yaml")
    said = str(error.value)
    assert "wrong.yaml:5: model.blocks.0: no layer is called 'rellu'. Did you mean 'relu'?" in said
    assert "wrong.yaml:7: model.cuts.fcc: no layer is called 'fcc'. Did you mean 'fc'?" in said
