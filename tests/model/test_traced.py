"""A traced model's operators need and keep what Paddle's own forward does, and reading them leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.base.framework import _dygraph_tracer
from paddle.nn import functional as F

from paddle_dp.model.traced import UncountedError, traced_model
from paddle_dp.part import find
from paddle_dp.plan.traced_model import TracedModel

T, L, W = 32, 2, 64
DECODERS: dict[str, dict[str, Any]] = {
    "gpt": {"heads": 4},
    "tied": {"heads": 4, "tied": True},
    "llama": {"heads": 4, "kv_heads": 2, "hidden": 96},
    "wide llama": {"heads": 4, "kv_heads": 2, "hidden": 96, "head_width": 32, "qk_norm": True},
}
IMAGES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "resnet": ({"depth": 18, "small_images": True, "classes": 10}, [3, 32, 32]),
    "convnet": ({}, [1, 8, 8]),
    "vit": ({"image": 32, "patch": 4, "depth": 2, "width": 64, "heads": 4, "classes": 10}, [3, 32, 32]),
    "mlp": ({"inputs": 64, "hidden": (256, 128), "classes": 10}, [64]),
}


@cache
def traced(use: str, *shape: int, dtype: str = "float32", **settings: Any) -> TracedModel:
    return traced_model(find("models", use)(**settings).build, [(list(shape), dtype)])


LONG = ["gpt", "llama"]  # "tied" and "wide llama" go through their code, too


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG)) for n in DECODERS])
def test_a_decoder_needs_what_the_paper_says(name: str) -> None:
    """6N + 12LHQT per token (PaLM, appendix B); N counts the weights that multiply: no embedding that is looked up."""
    word = "gpt" if name == "tied" else name.split()[-1]
    settings = {"vocab": 100, "width": W, "depth": L, "length": T, **DECODERS[name]}
    looked_up = {"blocks.0.position"} | (set() if name == "tied" else {"blocks.0.token.weight"})
    named = dict(find("models", word)(**settings).build().named_parameters())
    weights = sum(math.prod(p.shape) for n, p in named.items() if p.ndim == 2 and n not in looked_up)
    heads = settings["heads"] * settings.get("head_width", W // settings["heads"])
    assert traced(word, T, dtype="int64", **settings).flops == T * (6 * weights + 12 * L * heads * T)


def test_a_resnet_50_needs_8_gflop_forward() -> None:
    """4.1 billion multiply-adds a 224 × 224 image (torchvision prints 4.09)."""
    model = traced("resnet", 3, 224, 224, depth=50)
    assert sum(operator.flops for operator in model.operators) / 2 == pytest.approx(4.09e9, rel=1e-3)
    assert sum(operator.channels > 0 for operator in model.operators) == 53
    products = [operator.gradients for operator in model.operators if operator.product]
    assert products == [1] + [2] * 53  # nobody needs the image's gradient


def kept_by_paddle(build: Callable[[], nn.Layer], shape: Sequence[int], samples: int = 4) -> float:
    """Bytes of a sample that Paddle keeps for the backward of this model, but for weights."""
    model = build()
    weights = {tensor.data_ptr() for tensor in model.state_dict().values()}
    kept: dict[int, int] = {}

    def pack(tensor: paddle.Tensor) -> paddle.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.size * tensor.element_size()
        return tensor

    with paddle.autograd.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(paddle.randn([samples, *shape]))
    assert paddle.utils.flatten(outputs)[0].shape[0] == samples
    return sum(kept.values()) / samples


def kept(model: TracedModel) -> float:
    """The same by the model's operators."""
    return sum(4 * operator.saved + operator.masks for operator in model.operators)


@pytest.mark.parametrize("use", IMAGES)
def test_what_is_kept_is_what_paddle_keeps(use: str) -> None:
    """All but the statistics of norms, which are of channels."""
    settings, shape = IMAGES[use]
    build = find("models", use)(**settings).build
    assert kept(traced(use, *shape, **settings)) == pytest.approx(kept_by_paddle(build, shape), rel=0.01)


@pytest.mark.parametrize(
    "name",
    [
        "alexnet",
        "squeezenet1_1",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("mobilenet_v3_small", "googlenet", "shufflenet_v2_x0_25")
        ),
    ],
)
def test_what_a_model_of_paddle_keeps_is_what_paddle_keeps(name: str) -> None:
    """AlexNet's was 2 % too low: a pooling keeps its output, too."""
    build, shape = getattr(paddle.vision.models, name), [3, 224, 224]
    model = traced_model(build, [(shape, "float32")])
    assert kept(model) == pytest.approx(kept_by_paddle(build, shape, samples=2), rel=0.01)


FUNCTIONS: dict[str, Callable[[paddle.Tensor], paddle.Tensor]] = {
    "silu": F.silu,  # these kept too little: 58 %
    "divide": lambda x: x / (x + 3),
    "average": lambda x: F.avg_pool2d(x, 2),
    "normalize": F.normalize,
    "local response": lambda x: F.local_response_norm(x, 5),
    "sort": lambda x: x.sort(1),
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),  # these too much: up to 17 times
    "unfold": lambda x: F.unfold(x, 3),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "where": lambda x: paddle.where(x > 0, x, 2 * x),
    "hard": F.hardsigmoid,
    "hard swish": F.hardswish,
    "dropout": lambda x: F.dropout(x, 0.5),
    "turned": lambda x: x.transpose([0, 1, 3, 2]).matmul(x),
    "parts": lambda x: sum(part * part for part in x.unbind(1)),
    "list": lambda x: paddle.concat([x, x * x], 1),
}


class Function(nn.Layer):
    """A function of a convolution's output."""

    def __init__(self, function: Callable[[paddle.Tensor], paddle.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Conv2D(3, 8, 3, padding=1), function

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_keeps_what_its_gradient_reads(name: str) -> None:
    """Tables said which operators keep inputs, and which outputs, by the letters of their names."""
    build, shape = partial(Function, FUNCTIONS[name]), [3, 8, 8]
    model = traced_model(build, [(shape, "float32")])
    assert kept(model) == pytest.approx(kept_by_paddle(build, shape), rel=0.01)


class Standardized(nn.Layer):
    """A convolution whose weight is standardized at each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([8, 3, 3, 3])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        weight = self.weight
        return F.conv2d(x, (weight - weight.mean()) / (weight.std() + 1e-5))


def test_what_is_computed_of_weights_alone_is_no_samples() -> None:
    """Each sample of a micro-batch counted as one that reads, and keeps, a weight of its own."""
    *others, product = traced_model(Standardized, [([3, 8, 8], "float32")]).operators
    assert [operator.read + operator.written + operator.saved for operator in others] == [0.0] * len(others)
    assert (product.read, product.weights, product.saved) == (3 * 64, 8 * 27, 3 * 64)


class Shared(nn.Layer):
    """A layer that is the first block and the last."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        self.blocks = nn.LayerList([layer, nn.Linear(4, 4), layer])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_shared_layer_is_each_of_its_blocks_and_its_weights_are_one() -> None:
    """Its operators were all of its last block, and its weights sent twice."""
    model = traced_model(Shared, [([4], "float32")])
    assert [operator.block for operator in model.operators] == [0, 0, 1, 1, 2, 2]
    assert model.weights == (20, 20, 0)


def test_a_product_of_vectors_is_counted() -> None:
    """It ended with an IndexError."""
    model = traced_model(partial(Function, lambda x: x[0, 0, 0].matmul(x[0, 0, 1])), [([3, 8, 8], "float32")])
    assert model.operators[-1].flops == 2 * 8


def test_each_block_has_its_operators() -> None:
    model = traced("resnet", 3, 32, 32, depth=18, small_images=True, classes=10)
    assert model.blocks == 10 and len(model.handed) == 9  # the stem, eight residual blocks, the head
    assert model.handed == (*[64 * 32 * 32] * 3, *[128 * 16 * 16] * 2, *[256 * 8 * 8] * 2, *[512 * 4 * 4] * 2)
    products = model.by_block(model.columns["is_product"])
    assert products.tolist() == [1, 2, 2, 3, 2, 3, 2, 3, 2, 1]
    weights = find("models", "resnet")(depth=18, small_images=True, classes=10).build().parameters()
    assert sum(model.weights) == sum(int(p.size) for p in weights if not p.stop_gradient)


class Functions(nn.Layer):
    """Convolutions of both kinds and products of activations, without any block."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2D(4, 8, 3, stride=2, padding=1, groups=2, bias_attr=False)
        self.up = nn.Conv2DTranspose(8, 6, 2, stride=2, bias_attr=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        wide = self.up(self.down(x))  # [n, 6, 8, 8]
        return paddle.matmul(wide, wide, transpose_y=True)  # 6 products of [8, 8] and [8, 8]


def test_products_of_functions_are_counted_and_of_transposed_convolutions_by_their_input() -> None:
    model = traced_model(Functions, [([4, 8, 8], "float32")])
    down, up, scores = (2 * 16 * 8 * (2 * 9), 2 * 16 * 8 * (6 * 4), 2 * 6 * 8 * 8 * 8)
    assert [operator.flops for operator in model.operators] == [down, up, scores]
    assert model.blocks == 1 and model.handed == ()


class TwoHeads(nn.Layer):
    """A wide output before a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 100), nn.Linear(4, 2)

    def forward(self, x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        return self.wide(x), self.narrow(x)


@pytest.mark.parametrize(("build", "numbers"), [(TwoHeads, 102), (nn.Identity, 4)])
def test_a_loss_is_computed_of_all_that_the_forward_gives(build: Any, numbers: int) -> None:
    """Of the last operator alone it were 2 numbers, and a traceback."""
    assert traced_model(build, [([4], "float32")]).outputs == numbers


class Branching(nn.Layer):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + 1 if x.sum() > 0 else x


class Selecting(nn.Layer):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x[0].masked_select(x[0] > 0).exp()


class Inverse(nn.Layer):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.linalg.inv(x @ x.transpose([0, 2, 1]))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Branching, "branches on what it computes"),
        (Inverse, "inverse are not counted"),
        (Selecting, r"sizes in its forward depend on what it computes \(masked_select\)"),
        (partial(nn.Bilinear, 5, 4, 7), "bilinear are not counted"),
    ],
)
def test_operators_whose_products_are_unknown_are_refused(build: Any, reason: str) -> None:
    """Silence would count them as nothing."""
    shapes = [[5], [4]] if isinstance(build, partial) else [[3, 4]]
    with pytest.raises(UncountedError, match=reason):
        traced_model(build, [(shape, "float32") for shape in shapes])


def test_tracing_draws_nothing_and_names_nothing() -> None:
    paddle.seed(5)
    expected = paddle.rand([3]).tolist()
    paddle.seed(5)
    tracer = _dygraph_tracer()
    model = traced.__wrapped__("mlp", 4, inputs=4, hidden=(3,), classes=2, dropout=0.5)
    assert model.flops == 2 * (2 * 4 * 3 + 3 * 3 * 2)
    assert paddle.rand([3]).tolist() == expected and paddle.in_dynamic_mode()
    assert _dygraph_tracer() is tracer  # which knows the modes of a training


def test_tracing_takes_no_names_from_layers_made_later() -> None:
    with paddle.utils.unique_name.guard():
        traced.__wrapped__("mlp", 4, inputs=4, hidden=(3,), classes=2)
        assert nn.Linear(2, 2).weight.name == "linear_0.w_0"
