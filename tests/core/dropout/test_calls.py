"""Whatever drops in a model drops the same of a sample in any micro-batch; outside of a scope Paddle is as it was."""

import contextlib
import itertools

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.distributed.fleet.layers.mpu import random
from paddle.distributed.fleet.utils import recompute
from paddle.nn.functional import dropout as imported_early

from paddle_dp.core.dropout import EVALUATION, Scope, calls, current, install
from paddle_dp.errors import UsageError

install()
paddle.seed(0)
TEXT, IMAGE, VOLUME = (paddle.randn(shape) for shape in ([6, 5, 8], [6, 4, 5, 5], [6, 4, 3, 3, 3]))
WEIGHT = paddle.create_parameter([6, 8], "float32")
ATTENTION = nn.MultiHeadAttention(8, 2, dropout=0.5)
ENCODER = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5)
LSTM = nn.LSTM(8, 8, num_layers=3, dropout=0.5)
GRU = nn.GRU(8, 8, num_layers=2, dropout=0.5, direction="bidirect")
TIME_MAJOR = nn.LSTM(8, 8, num_layers=3, dropout=0.5, time_major=True)
HEADS = [6, 5, 2, 4]


def attention(x):
    x = x.reshape([-1, *HEADS[1:]])
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def drop_path(x):
    """As PaddleClas's models have it."""
    return x * paddle.floor(0.5 + paddle.rand((x.shape[0],) + (1,) * (x.ndim - 1)).astype(x.dtype)) / 0.5


CALLS = {
    "functional": (lambda x: F.dropout(x, 0.5), TEXT),
    "imported early": (lambda x: imported_early(x, 0.5), TEXT),
    "scaled in inference": (lambda x: F.dropout(x, 0.5, mode="downscale_in_infer"), TEXT),
    "flattened tokens": (lambda x: F.dropout(x.reshape([-1, 8]), 0.5).reshape(x.shape), TEXT),
    "whole samples": (lambda x: F.dropout(x, 0.5, axis=0), TEXT),
    "tokens of all samples": (lambda x: F.dropout(x, 0.5, axis=1), TEXT),
    "tokens": (lambda x: F.dropout(x, 0.5, axis=[0, 1]), TEXT),
    "channels 2-d": (nn.Dropout2D(0.5), IMAGE),
    "channels 3-d": (nn.Dropout3D(0.5), VOLUME),
    "alpha": (nn.AlphaDropout(0.5), TEXT),
    "feature alpha": (lambda x: F.feature_alpha_dropout(x, 0.5), IMAGE),
    "a weight": (lambda x: x @ F.dropout(WEIGHT, 0.5).t(), TEXT),
    "drop path": (drop_path, IMAGE),
    "drop path, sizes in tensors": (lambda x: x * paddle.rand([paddle.shape(x)[0], 1, 1, 1]), IMAGE),
    "paths by bernoulli": (lambda x: x * paddle.bernoulli(paddle.full([len(x), 1, 1], 0.5)), TEXT),
    "paths by uniform": (
        lambda x: x * paddle.uniform([len(x), 1, 1], "float64", -2, 2).astype(x.dtype),
        TEXT,
    ),
    "attention layer": (lambda x: ATTENTION(x, x, x), TEXT),
    "attention": (attention, TEXT),
    "encoder layer": (ENCODER, TEXT),
    "lstm": (lambda x: LSTM(x)[0], TEXT),
    "gru both ways": (lambda x: GRU(x)[0], TEXT),
    "lstm, time first": (lambda x: TIME_MAJOR(x.transpose([1, 0, 2]))[0].transpose([1, 0, 2]), TEXT),
}


def cut(call, x, *bounds, step=3):
    """What `call` gives for consecutive micro-batches of `x`, one behind the other."""
    outs = []
    for first, last in itertools.pairwise(bounds):
        with Scope(0, 0, step, first, last - first):
            outs.append(call(x[first:last]).numpy())
    return np.concatenate(outs)


@pytest.mark.parametrize("name", CALLS)
def test_a_sample_is_dropped_alike_in_any_micro_batch(name):
    call, x = CALLS[name]
    paddle.seed(1)
    whole = cut(call, x, 0, 6)
    paddle.seed(2)
    np.testing.assert_allclose(cut(call, x, 0, 1, 4, 6), whole, atol=3e-7)
    assert np.abs(cut(call, x, 0, 6, step=4) - whole).max() > 0.01


def test_a_number_for_each_sample_is_as_random_as_paddles():
    n = 20000
    with Scope(0, 0, 0, 0, n):
        numbers = paddle.uniform([n, 1], "float32", -1.0, 3.0)
        again = paddle.uniform([n, 1], "float32", -1.0, 3.0)
        ones = paddle.bernoulli(paddle.where(paddle.arange(n) < n // 2, 0.1, 0.9).reshape([n, 1]))
    assert numbers.dtype is paddle.float32 and numbers.min() >= -1 and numbers.max() < 3
    counts, _ = np.histogram(numbers.numpy(), 100, (-1, 3))
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 99 + 5 * 14.1  # chi-squared, 99 degrees of freedom
    assert abs(np.corrcoef(numbers.flatten().numpy(), again.flatten().numpy())[0, 1]) < 5 / n**0.5
    assert set(ones.flatten().tolist()) == {0.0, 1.0} and ones.dtype is paddle.float32
    halves = ones.reshape([2, -1]).mean(1).numpy()
    np.testing.assert_allclose(halves, [0.1, 0.9], atol=5 * 0.3 / (n / 2) ** 0.5)


@pytest.mark.parametrize(
    ("shape", "samples", "how"),
    [
        ([6], 6, {}),  # may be a number for each of 6 features
        ([6, 2], 6, {}),  # may be a slice of a whole
        ([5, 1], 6, {}),
        ([1], 1, {}),  # once for the whole batch
        ([], 1, {}),
        ([6, 1], 6, {"seed": 3}),
        ([6, 1], 6, {"dtype": "float16"}),
    ],
)
def test_all_other_draws_are_paddles(shape, samples, how):
    drawn = []
    for where in (contextlib.nullcontext(), Scope(0, 0, 0, 0, samples)):
        paddle.seed(5)
        with where:
            drawn.append([paddle.uniform(shape, **how), paddle.bernoulli(paddle.full([*shape, 2], 0.5))])
    assert all((plain == scoped).all() for plain, scoped in zip(*drawn, strict=True))


def test_dropout_is_paddles_formula():
    x = paddle.ones([6, 1000])
    with Scope(0, 0, 0, 0, 6):
        up = F.dropout(x, 0.25)
        down = F.dropout(x, 0.25, mode="downscale_in_infer")
        all_gone = F.dropout(x, 1.0)
        alpha = F.alpha_dropout(paddle.randn([6, 100000]), 0.25)
    assert set(np.unique(up.numpy())) == {np.float32(0), np.float32(1 / 0.75)}
    assert set(np.unique(down.numpy())) == {0.0, 1.0}
    assert not all_gone.any()
    assert abs(alpha.mean().item()) < 0.02
    assert abs(alpha.std().item() - 1) < 0.02


def test_recurrent_layers_one_by_one_are_the_whole_kernel():
    dropout, LSTM.dropout = LSTM.dropout, 0.0
    plain = LSTM(TEXT)
    LSTM.dropout = 1e-12
    with Scope(0, 0, 0, 0, 6):
        ours = LSTM(TEXT)
    LSTM.dropout = dropout
    for one, other in zip([plain[0], *plain[1]], [ours[0], *ours[1]], strict=True):
        assert (one == other).all()


def test_in_place_and_gradients():
    x = paddle.randn([6, 8])
    x.stop_gradient = False
    with Scope(0, 0, 0, 0, 6):
        out = F.dropout(x, 0.5)
    with Scope(0, 0, 0, 0, 6):
        written = F.dropout(x.detach().clone(), 0.5, inplace=True)
    assert (out == written).all()
    out.sum().backward()
    assert (x.grad == (out != 0).astype("float32") * 2).all()


def test_outside_of_a_scope_paddle_draws_and_evaluation_draws_nothing():
    drop = nn.Dropout(0.5)
    assert current() is None
    paddle.seed(1)
    first, axis = drop(TEXT), F.dropout(TEXT, 0.5, axis=1)
    paddle.seed(1)
    assert (first == drop(TEXT)).all() and (axis == F.dropout(TEXT, 0.5, axis=1)).all()
    assert not (first == drop(TEXT)).all()
    drop.eval()
    assert (drop(TEXT) == TEXT).all()
    with Scope(0, 0, 0, 0, 6) as scope:
        assert (drop(TEXT) == TEXT).all()
    assert not scope.calls


def test_a_second_forward_draws_what_the_first_drew_whatever_came_between():
    """A model's own recompute, nested calls, and another micro-batch's forward before the backward, as in 1F1B."""

    class Net(nn.Layer):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(8, 8), []

        def forward(self, x):
            out = F.dropout(F.dropout(self.linear(x), 0.3), 0.5)
            self.seen.append((out != 0).numpy())
            return out

    one, other, x = Net(), Net(), paddle.randn([6, 8])
    x.stop_gradient = False
    with Scope(0, 1, 2, 6, 6):
        F.dropout(x, 0.5)
        out = recompute(other, recompute(one, x))
        F.dropout(x, 0.5)
    with Scope(0, 1, 2, 12, 6) as scope:
        F.dropout(x, 0.5)
        out.sum().backward()
        assert scope.calls == {0: 1} and current() is scope
    for net in (one, other):
        assert len(net.seen) == 2 and (net.seen[0] == net.seen[1]).all()
    assert (one.seen[0] != other.seen[0]).any()


def test_a_paddle_that_lacks_a_place_is_refused_with_a_way_out(monkeypatch):
    monkeypatch.setattr(calls, "_originals", {})
    monkeypatch.delattr(paddle._C_ops, "rnn")
    with pytest.raises(UsageError, match=r"no paddle._C_ops.rnn(.|\n)*train.dropout=own"):
        install()


Q = paddle.zeros([6, 5, 2, 4])
NAMED = ["pre_layer_norm", False, "dropout1_rate", 0.0, "dropout2_rate", 0.5, "is_test", False]
FUSED = {
    "memory_efficient_attention": [Q, Q, Q, None, None, None, None, None, 0, 0, False, 0.5, 1.0, False],
    "flash_attn_unpadded": [Q, Q, Q, Q, Q, None, None, 1, 1, 1.0, 0.5, False, False, False, ""],
    "fused_feedforward": [Q, None, None, Q, *NAMED],
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_that_drop_are_refused_by_name(name):
    where = {patch.name: patch.value for patch in calls.patches()}  # not all of them are in a CPU's Paddle
    call = where[name]
    with Scope(0, 0, 0, 0, 6), pytest.raises(UsageError, match=rf"{name} draws(.|\n)*train.dropout=own"):
        call(*FUSED[name])
    without = [0.0 if isinstance(one, float) and one == 0.5 else one for one in FUSED[name]]
    with Scope(0, 0, 0, 0, 6), pytest.raises(Exception, match=r"(?s)^(?!.*train\.dropout)"):
        call(*without)  # the kernel itself, which is not there on a CPU


def test_fleets_own_dropout():
    random.get_rng_state_tracker().add("here", 1)

    def dropout(x, p):
        return random.dropout(x, p, rng_name="here")

    with Scope(0, 0, 0, 0, 6):
        ours, plain = dropout(TEXT, 0.5), F.dropout(TEXT, 0.5)
    with Scope(0, 0, 0, 0, 6):
        assert (F.dropout(TEXT, 0.5) == ours).all() and (ours != plain).any()
    assert (dropout(TEXT, 0.5) != ours).any()
    random.get_rng_state_tracker().reset()


def test_flash_attention_that_drops_is_computed_step_by_step():
    """There is no such kernel on a CPU: that an answer comes shows which way it went."""
    q = paddle.randn([6, 5, 4, 4])
    k = paddle.randn([6, 5, 2, 4])
    with Scope(0, 0, 0, 0, 6):
        out, *_ = paddle._C_ops.flash_attn(q, k, k, None, None, 0.5, True, False, False, "")
    with Scope(0, 0, 0, 0, 6):
        plain = F.scaled_dot_product_attention(q, k, k, dropout_p=0.5, is_causal=True)
    assert (out == plain).all()


def test_attention_that_does_not_drop_keeps_its_kernel_in_an_evaluation(monkeypatch):
    """Its probability is that of the training: a GPU's evaluation would lose its kernel."""
    q, asked = paddle.randn([6, 5, 2, 4]), []
    target = "paddle.nn.functional.sdpa.select_sdp_for_sdpa"
    monkeypatch.setitem(calls._originals, target, lambda param: asked.append(param) or "math")
    for training, count in ((False, 1), (True, 0)):
        with Scope(0, EVALUATION, 0, 0, 6):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, training=training)
        assert len(asked) == count
        asked.clear()
