"""Several documents in a sample: outputs, losses and gradients are those of the documents one by one."""

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from models import gpt, llama
from models._attention import attention

SMALL = {"vocab": 20, "width": 16, "depth": 2, "heads": 4, "length": 24}
LENGTHS = (5, 1, 11, 7)


@pytest.fixture(params=["gpt", "gpt_tied", "llama", "llama_scaled"])
def model(request):
    paddle.set_default_dtype("float64")
    paddle.seed(0)
    try:
        if request.param.startswith("gpt"):
            yield gpt.Config(**SMALL, tied=request.param == "gpt_tied").build()
        else:
            more = {"rope_scaling": "llama3", "rope_factor": 4.0} if request.param == "llama_scaled" else {}
            yield llama.Config(**SMALL, kv_heads=2, hidden=24, **more).build()
    finally:
        paddle.set_default_dtype("float32")


@pytest.fixture
def window():
    """Tokens and positions [1, 24] of four documents, and targets [24]."""
    random = np.random.default_rng(0)
    tokens, targets = random.integers(0, 20, (2, sum(LENGTHS)))
    positions = np.concatenate([np.arange(length) for length in LENGTHS])
    return paddle.to_tensor(tokens[None]), paddle.to_tensor(positions[None]), paddle.to_tensor(targets)


def gradients(model):
    found = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
    model.clear_gradients()
    return found


def test_a_packed_window_is_its_documents_one_by_one(model, window):
    tokens, positions, targets = window
    outputs = model(tokens, positions)[0]
    loss = F.cross_entropy(outputs, targets, reduction="sum")
    loss.backward()
    packed, alone, stop = gradients(model), [], 0
    for length in LENGTHS:
        start, stop = stop, stop + length
        alone.append(model(tokens[:, start:stop])[0])
        F.cross_entropy(alone[-1], targets[start:stop], reduction="sum").backward()
    alone = paddle.concat(alone)
    assert float((alone - outputs).abs().max()) < 1e-13
    assert float(loss) == pytest.approx(float(F.cross_entropy(alone, targets, reduction="sum")), rel=1e-14)
    for name, gradient in gradients(model).items():
        np.testing.assert_allclose(packed[name], gradient, atol=1e-13, err_msg=name)


def test_no_gradient_crosses_a_document(model, window):
    """Of one document's outputs, with respect to what each token is embedded as."""
    tokens, positions, _ = window
    seen = []
    hook = model.blocks[0].token.register_forward_post_hook(lambda _, x, y: seen.append(y))
    outputs = model(tokens, positions)
    hook.remove()
    (gradient,) = paddle.grad(outputs[:, 6:17].square().sum(), seen[0])
    size = gradient.abs().sum(-1)[0].numpy()
    # Paddle's softmax on CPUs cuts off at -64, so the least weight is e⁻⁶⁴ = 1.6e-28.
    assert size[:6].max() < 1e-26 and size[17:].max() < 1e-26 and size[6:17].min() > 1e-6


def test_positions_of_one_document_change_nothing(model, window):
    tokens = window[0]
    positions = paddle.arange(tokens.shape[1]).unsqueeze(0)
    assert float((model(tokens, positions) - model(tokens)).abs().max()) < 1e-13


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_masked_attention_weighs_nothing_else_in_any_precision(dtype):
    """Values of other documents may be as large as they like."""
    paddle.seed(0)
    q, k, v = (paddle.randn([1, 6, 2, 4]).astype(dtype) for _ in range(3))
    positions = paddle.to_tensor([[0, 1, 2, 0, 1, 2]])
    outputs = attention(q, k, v, True, positions)
    k[:, :3], v[:, :3] = k[:, :3] * 100, v[:, :3] * 1e4
    assert (attention(q, k, v, True, positions)[:, 3:] == outputs[:, 3:]).all()


def test_a_window_longer_than_the_model_is_refused(window):
    with pytest.raises(
        ValueError, match=r"length: 8 is less than the 24 tokens of a sample: set model\.length"
    ):
        gpt.Config(**{**SMALL, "length": 8}).build()(*window[:2])
