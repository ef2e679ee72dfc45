"""What gpt and llama promise alike: no look ahead, cuttable layers, blocks that compose, and writing on."""

import numpy as np
import paddle
import pytest
from paddle import nn

from models import gpt, llama

SMALL = {"vocab": 20, "width": 16, "depth": 2, "heads": 4, "length": 12}
MODELS = {
    "gpt": lambda **s: gpt.Config(**SMALL | s).build(),
    "gpt_tied": lambda **s: gpt.Config(**SMALL | s, tied=True).build(),
    "llama": lambda **s: llama.Config(**SMALL | s, kv_heads=2, hidden=24).build(),
    "llama_switched": lambda **s: llama.Config(
        **SMALL | s, kv_heads=2, hidden=24, head_width=6, bias="qkvo", qk_norm=True
    ).build(),
}


@pytest.fixture(params=MODELS)
def model(request):
    paddle.seed(1)
    made = MODELS[request.param]()
    for parameter in made.parameters():  # initial weights of 0.02 leave every score next to 0
        parameter.set_value(parameter + paddle.randn(parameter.shape) * 0.2)
    return made


def test_scores_of_every_next_token(model, tokens, every_parameter_learns):
    assert model(tokens(12)).shape == [2, 12, 20]
    assert model(tokens(3)).shape == [2, 3, 20]
    every_parameter_learns(model, tokens(12))


def test_no_token_sees_a_later_one(model, tokens):
    text = tokens(10)
    changed = text.clone()
    changed[:, 6] = (text[:, 6] + 1) % 20
    apart = (model(text) - model(changed)).abs().amax([0, 2]).numpy()
    assert (apart[:6] == 0).all() and (apart[6:] > 1e-4).all()


def test_the_blocks_in_their_order_are_the_model(model, tokens):
    hidden = tokens(8)
    for block in model.blocks:
        hidden = block(hidden)
    assert (hidden == model(tokens(8))).all()
    assert len(model.blocks) == 4 and {id(p) for p in model.blocks.parameters()} == {
        id(p) for p in model.parameters()
    }


def test_what_can_be_cut_is_there(model):
    cut = [
        (layer, name, how) for layer in model.sublayers() for name, how in getattr(layer, "cuts", {}).items()
    ]
    assert {how for _, _, how in cut} - {"per_head"} == {"heads", "rowwise", "colwise", "vocab"}
    for layer, name, how in cut:
        if how == "per_head":
            assert getattr(layer, name).weight.shape == [layer.head_width]
            continue
        weight = getattr(layer, name).weight
        assert weight.ndim == 2 and (how != "vocab" or 20 in weight.shape)
    linear = [layer for layer in model.sublayers() if isinstance(layer, nn.Linear)]
    assert all(any(getattr(owner, name) is layer for owner, name, _ in cut) for layer in linear)


def test_half_of_the_heads_is_half_of_the_columns(model, tokens):
    """Attention cut in two by contiguous slices, as a strategy would, and added up: the same outputs."""
    whole = model(tokens(9))
    for block in model.blocks[1:-1]:
        block.out = SumOfHalves(block)
        assert block.attention_methods == ("_attend",)
        block._attend = block.out.attend
    assert float((model(tokens(9)) - whole).abs().max()) < 1e-5


class SumOfHalves(nn.Layer):
    """Two blocks' worth of attention, each with half of the heads, each read by its half of the rows of `out`."""

    def __init__(self, block):
        super().__init__()
        self.whole, self.attend_whole = block.out, block._attend

    def attend(self, *given):
        *inputs, cache, positions = given
        halves = [[x.chunk(2, -1)[part] for x in inputs] for part in range(2)]
        return paddle.concat([self.attend_whole(*half, cache, positions) for half in halves], -1)

    def forward(self, x):
        rows, inputs = self.whole.weight.chunk(2, 0), x.chunk(2, -1)
        total = sum(paddle.matmul(i, r) for i, r in zip(inputs, rows, strict=True))
        return total if self.whole.bias is None else total + self.whole.bias


def test_writing_on_is_what_reading_all_again_would_write(model, tokens):
    text = tokens(4)
    written = model.generate(text, 8)
    for _ in range(8):
        text = paddle.concat([text, model(text)[:, -1].argmax(-1, keepdim=True)], 1)
    assert (written == text).all() and written.shape == [2, 12]


def test_writing_goes_on_past_the_length(model, tokens):
    written = model.generate(tokens(4), 30)
    assert written.shape == [2, 34]
    assert (written[:, :13] == model.generate(tokens(4), 9)).all()  # the 13th comes from all 12 before it
    again = model.generate(written[:, 7:13], 7)  # from half a length back
    assert (again == written[:, 7:20]).all()
    assert model.generate(tokens(4).tile([1, 5]), 1).shape == [2, 21]


def test_drawing_is_of_the_likeliest_and_of_the_seed_alone(model, tokens):
    text, before = tokens(6), paddle.get_rng_state()[0].__getstate__()
    draws = [model.generate(text, 6, temperature=1.0, seed=seed).numpy() for seed in (3, 3, 4)]
    assert (draws[0] == draws[1]).all() and (draws[0] != draws[2]).any()
    assert paddle.get_rng_state()[0].__getstate__() == before
    assert (model.generate(text, 6, temperature=1.0, top_k=1) == model.generate(text, 6)).all()
    many = model.generate(text[:1].tile([400, 1]), 1, temperature=1.0, top_k=3)[:, -1].numpy()
    likeliest = model(text[:1])[0, -1].topk(3)
    assert set(many) == set(likeliest[1].numpy())
    often = (many == likeliest[1][0].item()).mean()
    assert abs(often - nn.functional.softmax(likeliest[0])[0].item()) < 0.1


def test_writing_leaves_the_mode_as_it_was():
    model = MODELS["gpt"](dropout=0.5)
    text = paddle.zeros([1, 2], "int64")
    model.train()
    assert (model.generate(text, 5) == model.generate(text, 5)).all() and model.training
    model.eval()
    model.generate(text, 1)
    assert not model.training


def test_what_residual_branches_add_starts_small():
    wide = {name: MODELS[name](width=256, depth=8) for name in ("gpt", "llama")}
    for model in wide.values():
        block = model.blocks[1]
        assert float(block.up.weight.std()) == pytest.approx(0.02, rel=0.05)
        for layer in (block.out, block.down):
            assert float(layer.weight.std()) == pytest.approx(0.02 / 4, rel=0.05)
        text = paddle.to_tensor(np.random.default_rng(0).integers(0, 20, (4, 12)))
        loss = nn.functional.cross_entropy(model(text), text)
        assert float(loss) == pytest.approx(np.log(20), abs=0.3)  # knows nothing yet
