"""A parameter under ZeRO-3: where it is, and when. Fleet's own stage 3 is in `tests/sim/test_fleet.py`."""

from tests.ranks import run_ranks


def gathered():
    """What of a layer's weight is here: before, in forward, between, at the end; and after an evaluation."""
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
    model, seen = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), []
    first, values = model[0].weight, model[0].weight.numpy()
    see = lambda *_: seen.append(bool(first._is_initialized()))  # noqa: E731
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    zero = Zero(model, optimizer, fleet.get_hybrid_communicate_group(), Placements(), 3)
    model[1].register_forward_pre_hook(see)
    model[0].register_forward_pre_hook(lambda layer, _: seen.append((layer.weight.numpy() == values).all()))
    see()
    total = model(paddle.ones([2, 4])).sum()
    total.backward()
    zero.finish()
    see()
    grads = [p.grad is not None for p in model.parameters()]
    with paddle.no_grad():
        model(paddle.ones([2, 4]))
    zero.finish()
    see()
    return {
        "owner": zero.owner(first) == zero.group.rank,
        "seen": [bool(x) for x in seen],
        "gradients": sum(grads),
    }


def test_a_weight_is_here_while_its_layer_works_and_with_its_owner_always():
    for found in run_ranks(gathered, 2):
        mine = found["owner"]
        assert found["seen"] == [mine, True, mine, mine, True, mine, mine]
        assert found["gradients"] == 2  # of four, each rank owns two
