"""A parameter under ZeRO-3: where it is, when, what travels. Fleet's own stage 3 is in `tests/sim/test_fleet.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paddle_dp.plan.sharded import most_lent
from tests.ranks import run_ranks

WIDTH, LAYERS = 32, 8


def placed(prefetch: int, layers: int = LAYERS) -> Any:
    """A chain of linear layers, its sharding over two ranks, and the first layer's weights."""
    import paddle
    from paddle import nn
    from paddle.distributed import fleet

    from paddle_dp.gloo import install
    from paddle_dp.mesh import join
    from paddle_dp.parallel.placement import Placements
    from paddle_dp.parallel.sharding.zero import Zero

    install(join().device)
    how = fleet.DistributedStrategy()
    how.hybrid_configs = {"dp_degree": 1, "sharding_degree": 2}
    fleet.init(is_collective=True, strategy=how)
    paddle.seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    hcg = fleet.get_hybrid_communicate_group()
    values = model[0].weight.numpy()
    return model, Zero(model, optimizer, hcg, Placements(), 3, prefetch=prefetch), values


@contextmanager
def sent() -> Iterator[dict[str, int]]:
    """The bytes that this rank's endpoint sends meanwhile: parameters, gradients, and everything else."""
    from paddle_dp.mesh.messages import CHANNELS
    from paddle_dp.mesh.transport import HEADER, Endpoint

    names = {CHANNELS["lent"]: "parameters", CHANNELS["gradients"]: "gradients"}
    bytes_of, send = {"parameters": 0, "gradients": 0, "rest": 0}, Endpoint.send

    def counted(self: Endpoint, group: int, rank: int, *data: memoryview) -> None:
        bytes_of[names.get(group, "rest")] += HEADER.size + sum(map(len, data))
        send(self, group, rank, *data)

    Endpoint.send = counted  # type: ignore[method-assign]
    try:
        yield bytes_of
    finally:
        Endpoint.send = send  # type: ignore[method-assign]


def steps(prefetch: int) -> dict[str, Any]:
    """In a rank: three forwards and backwards, and an evaluation. What is here at the first layer and between steps,
    what the third step sends, and the most that was lent at once."""
    import paddle

    model, zero, values = placed(prefetch)
    first, seen = model[0].weight, []
    see = lambda *_: seen.append(bool(first._is_initialized()))  # noqa: E731
    model[0].register_forward_pre_hook(
        lambda layer, _: seen.append(bool((layer.weight.numpy() == values).all()))
    )
    model[3].register_forward_pre_hook(see)
    x, gradients = paddle.ones([2, WIDTH]), []
    for _ in range(3):
        see()
        with sent() as bytes_of:
            model(x).sum().backward()
            zero.finish()
        gradients.append([p.grad is not None for p in model.parameters()])
        for parameter in model.parameters():
            parameter.clear_gradient(False)
    with paddle.no_grad():
        model(x)
    zero.finish()
    see()
    return {
        "owner": zero.owner(first) == zero.group.rank,
        "seen": seen,
        "gradients": [sum(of_step) for of_step in gradients],
        "sent": bytes_of,
        "most": zero.stage3.most,
        "size": sum(4 * int(p.size) for p in model.parameters()),
    }


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_weight_is_here_while_its_layer_works_and_with_its_owner_always(prefetch: int) -> None:
    ranks = run_ranks(steps, 2, prefetch)
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    for found in ranks:
        mine = found["owner"]
        assert found["seen"] == [*[mine, True, mine] * 3, True, mine, mine]
        assert found["gradients"] == [LAYERS] * 3  # of 16: each rank owns half of them
        if prefetch:  # two layers travel together, one weight of each owner, and two go before them
            assert found["most"] == pytest.approx(
                most_lent([[layer, 0], [0, layer]] * (LAYERS // 2), 0, 1), rel=0.05
            )
        else:
            assert found["most"] <= layer
        assert found["sent"]["rest"] < 3000
    whole = ranks[0]["size"]
    # (n - 1)/n of it in forward, in backward all but the last layer or two, which are still here, and as gradients.
    parameters = sum(found["sent"]["parameters"] for found in ranks)
    assert parameters == pytest.approx(2 * whole - (1 + prefetch) * layer, rel=0.05)
    assert sum(found["sent"]["gradients"] for found in ranks) == pytest.approx(whole, rel=0.05)
