"""The layers of a tensor axis, as one of its two ranks has them, without the other one."""

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.axes.tensor.layers import TensorParallelizer
from paddle_dp.core import lora
from paddle_dp.core.placement import Placements
from paddle_dp.core.precision import Rounder
from paddle_dp.errors import UsageError
from paddle_dp.gloo.fake_group import alone


class Pair(nn.Layer):
    """Two layers with a `cuts` table; `shares`: the second one's weight is the first one's."""

    def __init__(self, first, second, cuts, shares=False):
        super().__init__()
        self.cuts, self.first, self.second = cuts, first, second
        if shares:
            self.second.weight = self.first.weight


class Scores(nn.Layer):
    """Scores of classes from a weight [classes, width], as those of an embedding's words."""

    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([8, 4])
        self.bias = self.create_parameter([8], is_bias=True)

    def forward(self, x):
        return paddle.matmul(x, self.weight, transpose_y=True) + self.bias


class Dropping(nn.Linear):
    """A linear layer that drops inputs: in evaluation it is a plain one."""

    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5, training=self.training))


class Named(nn.Linear):
    """A linear layer with another name."""


def hooked():
    layer = nn.Linear(4, 4)
    layer.register_forward_post_hook(lambda layer, inputs, output: output * 2 if layer.training else output)
    return layer


def parallelize(model):
    with alone(1, 2) as group:
        parallelizer = TensorParallelizer(group, Placements())
        parallelizer.parallelize(model)
    return parallelizer


@pytest.mark.parametrize("way", ["colwise", "rowwise"])
def test_a_weight_that_two_layers_share_is_one_slice(way):
    """They had two slices of one name, so they were untied, and shared the moments of one of them."""
    model = Pair(nn.Linear(4, 4), nn.Linear(4, 4), {"first": way, "second": way}, shares=True)
    weight = model.first.weight.numpy()
    parallelize(model)
    assert model.second.weight is model.first.weight
    np.testing.assert_array_equal(model.first.weight, np.split(weight, 2, way == "colwise")[1])
    assert len({p.name for p in model.parameters()}) == len(model.parameters()) == 3


@pytest.mark.parametrize(
    ("cuts", "sentence"),
    [
        ({"first": "colwise", "second": "rowwise"}, r"share a weight \[4, 4\].*along different dims"),
        ({"second": "colwise"}, "'first.weight' is whole, but it is also the weight of another layer, which is cut"),
        ({"first": "rowwise"}, "'second.weight' is whole"),
    ],
)  # fmt: skip
def test_a_shared_weight_that_is_cut_in_two_ways_is_refused(cuts, sentence):
    with pytest.raises(UsageError, match=sentence):
        parallelize(Pair(nn.Linear(4, 4), nn.Linear(4, 4), cuts, shares=True))


@pytest.mark.parametrize(
    "cuts", [{"first": "vocab", "second": "vocab"}, {"second": "vocab", "first": "vocab"}]
)
def test_words_and_scores_share_a_slice_in_either_order(cuts):
    model = Pair(nn.Embedding(8, 4), Scores(), cuts, shares=True)
    weight = model.first.weight.numpy()
    assert parallelize(model).cuts_classes
    assert model.second.weight is model.first.weight
    np.testing.assert_array_equal(model.first.weight, weight[4:])


def test_scores_of_an_embedding_s_words_are_cut_without_an_embedding():
    """Each rank kept all classes, and the loss counted twice as many."""
    model = Pair(nn.Linear(4, 4), Scores(), {"second": "vocab"})
    weight, bias = model.second.weight.numpy(), model.second.bias.numpy()
    assert parallelize(model).cuts_classes
    np.testing.assert_array_equal(model.second.weight, weight[4:])
    np.testing.assert_array_equal(model.second.bias, bias[4:])


@pytest.mark.parametrize("setting", ["padding_idx", "max_norm", "scale_grad_by_freq"])
def test_an_embedding_with_settings_that_fleet_s_lacks_is_not_cut(setting):
    """Its rows were neither scaled nor kept, without a word."""
    embedding = nn.Embedding(8, 4, **{setting: {"padding_idx": 0}.get(setting, 1.0)})
    with pytest.raises(UsageError, match=f"a {setting} cannot be cut by vocabulary"):
        parallelize(Pair(embedding, nn.Linear(4, 4), {"first": "vocab"}))


@pytest.mark.parametrize("way", ["colwise", "heads", "rowwise", "vocab", "classes"])
@pytest.mark.parametrize(
    ("make", "sentence"),
    [(lambda: Dropping(4, 4), "lacks its forward"), (hooked, "lacks the hooks on its forward")],
)
def test_a_layer_that_does_more_than_a_linear_one_is_not_cut(make, sentence, way):
    """What it did in training alone was gone, and the comparison in evaluation did not see it."""
    with pytest.raises(UsageError, match=sentence):
        parallelize(Pair(make(), nn.Linear(4, 4), {"first": way}))


def test_a_layer_with_the_hooks_of_an_earlier_training_is_cut():
    """Low precision on CPUs leaves its hooks, which the next training sets anew."""
    model = Pair(nn.Linear(4, 4), nn.Linear(4, 4), {"first": "colwise", "second": "rowwise"})
    Rounder(model, "bfloat16")
    parallelize(model)
    assert model.first.weight.shape == [4, 2]


def test_a_linear_layer_with_an_adapter_or_another_name_is_cut():
    model = Pair(Named(4, 4), nn.Linear(4, 4), {"first": "colwise", "second": "rowwise"})
    parallelize(lora.add_low_rank(model, ["second"], 2, 1.0, 0))
    assert model.first.weight.shape == [4, 2] and lora.low_rank_of(model.second) is not None


@pytest.mark.parametrize(
    ("kind", "way"),
    [("Linear", "colwise"), ("Linear", "rowwise"), ("Linear", "classes"), ("Conv2D", "rowwise")],
)
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_weight_that_a_hook_computes_is_not_cut(norm, kind, way):
    """That was an AttributeError of a tensor on each rank."""
    layer = nn.Conv2D(4, 4, 3) if kind == "Conv2D" else nn.Linear(4, 4)
    with pytest.raises(
        UsageError, match=f"the weight of a {kind} that is cut as {way} is computed by a hook"
    ):
        parallelize(Pair(norm(layer), nn.Linear(4, 4), {"first": way}))
