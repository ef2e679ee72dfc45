"""The ordered blocks of any model, and the proof that they are its forward."""

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_dp.assembly.sample_trial import ForkRunner
from paddle_dp.axes.meta_init import anatomy
from paddle_dp.batch import call
from paddle_dp.core.blocks import Function, blocks_of, check_chain, has_groups, is_table, outside, settle
from paddle_dp.errors import UsageError
from paddle_dp.model.recompute import recomputed
from paddle_dp.part import Annotation, annotate, read_part
from paddle_dp.units import Recompute
from tests.house.learners import Chain

SHIPPED = [
    ({"use": "resnet", "depth": 18, "classes": 4, "small_images": True}, [2, 3, 8, 8], 10),
    ({"use": "convnet", "widths": [4, 8, 8]}, [2, 1, 8, 8], 4),
    ({"use": "mlp", "hidden": [8, 8], "dropout": 0.3}, [2, 1, 8, 8], 3),
    ({"use": "mlp", "hidden": []}, [2, 64], 1),
    ({"use": "large_classifier", "classes": 10}, [2, 1, 8, 8], 3),
    ({"use": "large_classifier", "classes": 10, "backbone": "resnet18"}, [2, 3, 32, 32], 11),
]


def images(shape):
    return lambda: paddle.randn(shape)


@pytest.mark.parametrize(("settings", "shape", "number"), SHIPPED, ids=lambda value: str(value)[:20])
def test_shipped_models_are_chains(settings, shape, number):
    model = read_part("models", settings).build()
    names = list(model.state_dict())
    assert len(blocks_of(model)) == number and not outside(model, blocks_of(model))
    check_chain(model, images(shape), "strategy.pipeline")
    model.eval()
    x = paddle.randn(shape)
    before = model(x)
    assert len(settle(model)) == number and settle(model)[0] is settle(model)[0]
    np.testing.assert_array_equal(model(x), before)
    assert list(model.state_dict()) == names


def test_a_resnet_has_paddles_names():
    model = read_part("models", {"use": "resnet", "depth": 18, "classes": 7}).build()
    assert list(model.state_dict()) == list(paddle.vision.models.resnet18(num_classes=7).state_dict())


def test_a_sequence_is_its_children_used_twice_or_not():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(2, 4), shared, nn.ReLU(), shared)
    first, second, third, fourth = blocks_of(model)
    assert first is model[0] and second[0] is shared and third is model[2] and fourth[0] is shared
    assert second is not fourth
    assert anatomy(model).tied == ((1, 3),) and anatomy(model).blocks == 4


@pytest.mark.parametrize("value", [3, "many", None])
def test_a_setting_called_blocks_is_no_list(value):
    model = nn.Linear(2, 2)
    model.blocks = value
    assert blocks_of(model) == []


class Between(nn.Layer):
    """Does something between its blocks, which a pipeline would leave out."""

    def __init__(self, how):
        super().__init__()
        self.how, self.blocks = how, nn.LayerList([nn.Linear(8, 8), nn.BatchNorm1D(8), nn.Linear(8, 8)])

    def forward(self, x):
        for block in self.blocks:
            x = {
                "residual": lambda x, b=block: x + b(x),
                "dropout": lambda x, b=block: F.dropout(b(x), 0.5, training=self.training),
                "branch": lambda x, b=block: (b(x), x) if self.training and b is self.blocks[-1] else b(x),
                "chain": block,
            }[self.how](x)
        return x


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("residual", "in evaluation their outputs differ by up to"),
        ("dropout", "in training their outputs differ by up to"),
        ("branch", r"in training it gives \[\[2, 8\], \[2, 8\]\], and they give \[\[2, 8\]\]"),
    ],
)
def test_what_forward_does_beside_its_blocks_is_noticed(how, said):
    with pytest.raises(UsageError, match=said):
        check_chain(Between(how), images([2, 8]), "strategy.pipeline")


class Masked(nn.Layer):
    """Illegal actions have a score of -inf; `shift` is what forward adds beside its blocks."""

    def __init__(self, shift):
        super().__init__()
        self.shift, mask = shift, paddle.to_tensor([0.0, float("-inf"), 0.0])
        self.blocks = nn.LayerList([nn.Linear(8, 3), Function(lambda scores: scores + mask)])

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x)) + self.shift


def test_infinite_outputs_are_compared():
    """-inf - -inf is NaN: an honest model was refused."""
    check_chain(Masked(0.0), images([2, 8]), "strategy.pipeline")
    for shift, said in ((0.5, "differ by up to 0.5"), (float("inf"), "differ in what is infinite or NaN")):
        with pytest.raises(UsageError, match=f"in evaluation their outputs {said}"):
            check_chain(Masked(shift), images([2, 8]), "strategy.pipeline")


def test_a_function_that_draws_is_refused():
    """One process would draw it inside forward, and a stage in a block: other masks."""
    model = annotate(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        Annotation(blocks=("0", {"use": "paddle.nn.functional.dropout", "p": 0.5}, "1")),
    )
    model.forward = lambda x: model[1](F.dropout(model[0](x), 0.5, training=True))
    with pytest.raises(UsageError, match=r"dropout .* draws random numbers"):
        check_chain(model, images([8, 4]), "strategy.pipeline")


def test_a_look_leaves_no_trace():
    model, x = Between("chain"), paddle.randn([2, 8])
    model.blocks[0].eval()
    kept = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    paddle.seed(5)
    drawn = paddle.rand([3]).tolist()
    paddle.seed(5)
    check_chain(model, lambda: x, "strategy.pipeline")
    assert paddle.rand([3]).tolist() == drawn
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value, kept[name])
    assert [block.training for block in model.blocks] == [False, True, True] and model.training


def test_a_table_finds_the_layers_that_stand_there_now():
    model = annotate(
        nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)),
        Annotation(blocks=(("0", "1"), "2", F.relu)),
    )
    assert is_table(model)
    new = model[0] = nn.Linear(2, 3)
    blocks = settle(model)
    assert blocks[0][0] is new and is_table(model) and settle(model)[0] is blocks[0]
    np.testing.assert_array_equal(
        model(paddle.ones([1, 2])), F.relu(model[2](model[1](new(paddle.ones([1, 2])))))
    )


class OfTwoInputs(nn.Layer):
    """Its first block reads both inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, x, y):
        return self.a(x) + self.b(y)


class Chained(nn.Layer):
    blocks = ("first", ("middle", F.relu), "head")

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.head = OfTwoInputs(), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, y):
        return self.head(F.relu(self.middle(self.first(x, y))))


def test_the_first_block_of_a_table_reads_several_inputs():
    x, y = paddle.rand([5, 3]), paddle.rand([5, 2])
    for inputs in ({"x": x, "y": y}, (x, y)):
        model = Chained()
        expected = call(model, inputs, model.forward)
        check_chain(model, lambda inputs=inputs: inputs, "strategy.recompute")
        recomputed(model, Recompute.parse("full"))
        np.testing.assert_array_equal(call(model, inputs, model.forward), expected)
        np.testing.assert_array_equal(model(x, y=y), expected)


class MaskedChain(nn.Layer):
    """A stem, layers that get a mask besides, and a head: no chain."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(3, 4), nn.Linear(4, 1)
        self.layers = nn.LayerList([MaskedLayer() for _ in range(3)])

    def forward(self, x, mask):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)


class MaskedLayer(nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear, self.runs = nn.Linear(4, 4), 0

    def forward(self, x, mask):
        self.runs += 1
        return x + F.gelu(self.linear(x)) * mask


@pytest.mark.parametrize("blocks", [("layers.*",), ("stem", "layers.*", "head")])
def test_names_of_layers_alone_are_recomputed_in_the_models_own_forward(blocks):
    paddle.seed(1)
    x, mask, results = paddle.rand([5, 3]), paddle.ones([5, 1]), []
    mask[2:] = 0.0
    for how in ("none", "full"):
        paddle.seed(2)
        model = annotate(MaskedChain(), Annotation(blocks=blocks))
        assert not has_groups(model) and len(blocks_of(model)) == (3 if len(blocks) == 1 else 5)
        loss = recomputed(model, Recompute.parse(how))(x, mask).square().mean()
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
        again = [layer.runs - 1 for layer in model.layers]
        assert again == [int(how == "full")] * 3
    for plain, computed in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, computed)
    with pytest.raises(UsageError, match="forward of MaskedChain is not its blocks one after another"):
        check_chain(model, lambda: (x, mask), "strategy.sequence")


class Reused(MaskedChain):
    """ALBERT: one layer in every place of a list."""

    def __init__(self):
        super().__init__()
        self.layers = nn.LayerList([self.layers[0]] * 3)


@pytest.mark.parametrize(
    "blocks", [("layers.*",), ("layers.0",), ("layers.0",) * 3, ("stem", "layers.*", "head")]
)
@pytest.mark.parametrize("how", ["full", "every 2 blocks"])
def test_a_layer_that_forward_runs_several_times_is_recomputed_each_time(blocks, how):
    """A table of one layer alone made the chain of its uses the forward, and the stem and the head were missed."""
    paddle.seed(1)
    x, mask, results = paddle.rand([5, 3]), paddle.ones([5, 1]), []
    for each in ("none", how):
        paddle.seed(2)
        model = annotate(Reused(), Annotation(blocks=blocks))
        assert not has_groups(model)
        loss = recomputed(model, Recompute.parse(each))(x, mask).square().mean()
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
        in_none = each == "none" or (blocks == ("layers.0",) and how != "full")
        assert model.layers[0].runs == (3 if in_none else 6)
    for plain, computed in zip(*results, strict=True):
        np.testing.assert_allclose(plain, computed, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("recompute_first", [True, False])
def test_uses_of_a_layer_are_a_chain_under_a_sequence_axis(recompute_first):
    model = annotate(Chain(*[nn.Linear(4, 4)] * 3), Annotation(blocks=("blocks.*",)))
    x = paddle.rand([5, 4])
    expected = model(x)
    for step in ("recompute", "chain") if recompute_first else ("chain", "recompute"):
        if step == "chain":
            assert len({id(block) for block in settle(model, chain=True)}) == 3
        else:
            recomputed(model, Recompute.parse("full"))
    np.testing.assert_array_equal(model(x), expected)


class InTokens(nn.Layer):
    """A chain, whose forward has a line for full sequences between two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(self.a(x).reshape([-1, 6, 4]))


@pytest.mark.parametrize("recompute_first", [True, False])
def test_slices_of_sequences_go_through_the_chain_of_named_layers(recompute_first):
    """Not through forward's own code, which is for full sequences."""
    paddle.seed(1)
    model = annotate(InTokens(), Annotation(blocks=("a", "b")))
    full = paddle.rand([2, 6, 3])
    expected = model(full).numpy()
    for step in ("recompute", "chain") if recompute_first else ("chain", "recompute"):
        if step == "chain":
            settle(model, chain=True)
        else:
            recomputed(model, Recompute.parse("full"))
    np.testing.assert_array_equal(model(full), expected)
    np.testing.assert_array_equal(model(full[:, :3]), expected[:, :3])


def test_a_script_may_give_layers_and_functions_themselves():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    annotate(model, Annotation(blocks=([model[0], F.relu], model[1])))
    assert model.annotated_blocks == (("0", F.relu), "1")


@pytest.mark.parametrize("every", [pytest.param("full", marks=pytest.mark.long), "every 2 blocks"])
def test_statistics_are_counted_once_by_what_is_computed_twice(every):
    """A ResNet under recompute: the gradients and the running statistics of the plain run, bit for bit."""
    found = []
    for how in ("none", every):
        paddle.seed(2)
        model = read_part(
            "models", {"use": "resnet", "depth": 18, "classes": 4, "small_images": True}
        ).build()
        recomputed(model, Recompute.parse(how))
        for _ in range(2):
            model(paddle.randn([4, 3, 8, 8])).square().sum().backward()
        grads = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
        found.append({**grads, **{f"state {n}": t.numpy() for n, t in model.state_dict().items()}})
    assert len(found[0]) == 62 + 102
    for name, value in found[0].items():
        np.testing.assert_array_equal(found[1][name], value, err_msg=name)


@pytest.mark.processes
def test_blocks_that_keep_state_are_a_chain():
    """Each side runs in a process of its own, from the same vectors of spectral norm."""

    class Net(nn.Layer):
        blocks = ("first", "last")

        def __init__(self, more=0):
            super().__init__()
            self.first, self.last = nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 2)
            self.more = more

        def forward(self, x):
            return self.last(self.first(x)) + self.more

    inputs = paddle.rand([2, 4])
    check_chain(Net(), lambda: inputs, "strategy.pipeline", ForkRunner(60))
    with pytest.raises(UsageError, match="is not its blocks one after another"):
        check_chain(Net(1), lambda: inputs, "strategy.pipeline", ForkRunner(60))
