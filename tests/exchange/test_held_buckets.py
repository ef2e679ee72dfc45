"""Where a layer exchanges activations behind a gradient, the gradient's bucket goes behind that exchange."""

from types import SimpleNamespace

import paddle
import paddle.distributed as dist
import pytest
from paddle import nn
from paddle.autograd import PyLayer

from paddle_dp.axes.tensor.layers import CopyToTensorParallel, before_exchanges
from paddle_dp.exchange import buckets
from paddle_dp.exchange.bucketed_gradients import BucketedGradients
from paddle_dp.mesh.messages import Messages


class Exchange(PyLayer):
    """As Megatron's f: backward exchanges."""

    log: list[str]

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Exchange.log.append("activations")
        return gradient.clone()


@pytest.mark.parametrize(
    ("held", "order"),
    [
        (False, ["bucket", "bucket", "activations", "bucket", "bucket"]),
        (True, ["activations", "bucket", "bucket", "bucket", "bucket"]),
    ],
)
def test_a_held_bucket_leaves_behind_the_exchange_of_its_layer(monkeypatch, held, order):
    Exchange.log = log = []
    monkeypatch.setattr(buckets, "SMALLEST", 4)  # bytes: each gradient alone
    monkeypatch.setattr(Messages, "gather", lambda self, mine, what: [mine])  # a rank alone
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: log.append("bucket") or done)
    norm, cut = nn.LayerNorm(4), nn.Linear(4, 4)
    parameters = [*norm.parameters(), *cut.parameters()]
    exchange = BucketedGradients(
        SimpleNamespace(ranks=[0], rank=0), parameters, deferred=[2, 3] if held else []
    )
    for _ in range(2):  # how often a gradient comes is learned in the first
        log.clear()
        with exchange.backward(last=True):
            cut(Exchange.apply(norm(paddle.ones([2, 4])))).sum().backward()
        exchange.finish()
    assert log == order


def test_the_gradients_before_an_exchange_are_those_of_layers_whose_outputs_are_cut():
    cut = CopyToTensorParallel(nn.Linear(4, 4), SimpleNamespace(ranks=[0]))
    model = nn.Sequential(nn.Linear(4, 4), cut)
    assert before_exchanges(model) == {id(parameter) for parameter in cut.parameters()}
