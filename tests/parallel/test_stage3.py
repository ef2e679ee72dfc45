"""Why ZeRO-3 is our own: fleet's stage 3 learns something else where weights decay by their names."""

import numpy as np
import pytest

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
    see()
    grads = [p.grad is not None for p in model.parameters()]
    with paddle.no_grad():
        model(paddle.ones([2, 4]))
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


def fleets_own(level):
    """How far fleet's own sharding is from one process after 5 steps of AdamW, where biases do not decay."""
    import paddle
    import paddle.distributed as dist
    from paddle.distributed.sharding import group_sharded_parallel

    from paddle_dp.gloo import install
    from paddle_dp.mesh import join

    def build():
        paddle.seed(0)
        model = paddle.nn.Sequential(paddle.nn.Linear(64, 64), paddle.nn.Tanh(), paddle.nn.Linear(64, 8))
        decaying = {p.name for p in model.parameters() if p.ndim > 1}
        rule = {"weight_decay": 0.5, "apply_decay_param_fun": decaying.__contains__}
        return model, paddle.optimizer.AdamW(1e-2, parameters=model.parameters(), **rule)

    def learn(model, optimizer, inputs):
        model(paddle.to_tensor(inputs)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()

    install(join().device)
    batches = np.random.RandomState(0).rand(5, 8, 64).astype("float32")
    (one, alone), (many, optimizer) = build(), build()
    placed, optimizer, _ = group_sharded_parallel(many, optimizer, level, segment_size=100)
    for batch in batches:
        learn(one, alone, batch)
        learn(placed, optimizer, np.split(batch, 2)[dist.get_rank()])
    if level == "p_g_os":
        placed.get_all_parameters(convert2cpu=False)
    pairs = zip(one.parameters(), many.parameters(), strict=True)
    return max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs)


@pytest.mark.long
def test_fleets_own_stage_3_forgets_which_weights_decay():
    """Why it is not used (docs/decisions/0008). When this fails, a newer Paddle is right by itself."""
    assert max(run_ranks(fleets_own, 2, "os_g")) < 1e-5
    assert min(run_ranks(fleets_own, 2, "p_g_os")) > 1e-3
