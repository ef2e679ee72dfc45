"""The tiny model in any layout, against one process; `run_ranks` runs `layout` on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

from paddle_dp.gloo import fleet_mends, install
from paddle_dp.mesh import join
from tests.gloo import tiny

AXES = {"data": "dp", "tensor": "mp", "pipeline": "pp", "sharding": "sharding", "sequence_axis": "sep"}
MICROS = 2


def joined() -> Any:
    """The mesh, with the bridge."""
    mesh = join()
    install(mesh.device)
    return mesh


def layout(options: dict[str, Any]) -> dict[str, float]:
    """The largest differences from one process: "sgd loss", "sgd weights", "adamw loss", "adamw weights".

    `options`: degrees by axis, and tied, sequence, recompute, version (of sharding), optimizers; `mend: false` leaves
    out what `fleet_mends` puts right.
    """
    hcg = start(options)
    found: dict[str, float] = {}
    for optimizer in options.get("optimizers", ("sgd", "adamw")):
        found |= compare(optimizer, train(hcg, optimizer, options), options, hcg)
    return found


def with_and_without(options: dict[str, Any], without: dict[str, Any]) -> list[float]:
    """How far the weights are from one process's, with a mend and, in the same job, without it."""
    hcg, (optimizer,) = start(options), options["optimizers"]
    found = []
    for chosen in (options, {**options, **without}):
        differences = compare(optimizer, train(hcg, optimizer, chosen), chosen, hcg)
        found.append(differences[f"{optimizer} weights"])
    return found


def start(options: dict[str, Any]) -> Any:
    """The bridge and fleet, in this layout; returns the HybridCommunicateGroup."""
    joined()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{short}_degree": options.get(axis, 1) for axis, short in AXES.items()}
    strategy.hybrid_configs["sharding_configs"].split_param = options.get("version") == 2
    micro_batch = tiny.BATCH // options.get("data", 1) // options.get("sharding", 1) // MICROS
    strategy.pipeline_configs = {
        "accumulate_steps": MICROS, "micro_batch_size": micro_batch, **fleet_mends.PIPELINE_SETTINGS
    }  # fmt: skip
    strategy.tensor_parallel_configs = {"tensor_init_seed": 7}
    fleet.init(is_collective=True, strategy=strategy)
    return fleet.get_hybrid_communicate_group()


def compare(optimizer: str, ours: Any, options: dict[str, Any], hcg: Any = None) -> dict[str, float]:
    losses, weights = tiny.train_plain(optimizer, bool(options.get("tied")))
    own_losses, own = ours
    return {
        f"{optimizer} loss": max(abs(a - b) for a, b in zip(losses, own_losses, strict=True)),
        f"{optimizer} weights": max(
            float(abs(p.numpy() - own_part(weights[name], p, hcg)).max()) for name, p in own.items()
        ),
    }


def own_part(whole: Any, parameter: Any, hcg: Any) -> Any:
    """This rank's part of a whole array, cut as its parameter is."""
    if list(whole.shape) == list(parameter.shape):
        return whole
    parts = np.split(whole, hcg.get_model_parallel_world_size(), parameter.split_axis)
    return parts[hcg.get_model_parallel_rank()]


def by_plain_name(model: Any) -> dict[str, Any]:
    return {name.replace("shared_layers.tied", "0"): p for name, p in model.named_parameters()}


def build(hcg: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """The model in its layout with the plain one's initial weights, and its loss."""
    cut, tied = options.get("tensor", 1) > 1, bool(options.get("tied"))
    parallel = fleet.meta_parallel.ParallelCrossEntropy() if cut else None

    def loss_of(scores: Any, targets: Any) -> Any:
        if parallel is not None:
            return parallel(scores, targets.unsqueeze(-1)).mean()
        return paddle.nn.functional.cross_entropy(scores, targets)

    descriptions = tiny.blocks(cut, tied, bool(options.get("sequence")))
    if options.get("pipeline", 1) > 1:
        context = {"mp_group": hcg.get_model_parallel_group(), "offload": False, "partition": False}
        recompute = {"recompute_interval": 1, "recompute_ctx": context} if options.get("recompute") else {}
        model = fleet.meta_parallel.PipelineLayer(
            layers=descriptions, loss_fn=loss_of, topology=hcg.topology(), **recompute
        )
    else:
        model = paddle.nn.Sequential(*(one.build_layer() for one in descriptions))
    initial = {name: p.numpy() for name, p in tiny.plain(tied)[0].named_parameters()}
    for name, parameter in by_plain_name(model).items():
        parameter.set_value(own_part(initial[name], parameter, hcg))
    return model, loss_of


def train(hcg: Any, optimizer: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Global losses, and this rank's parameters afterwards by their plain names."""
    mend = options.get("mend", True)
    model, loss_of = build(hcg, options)
    parameters = by_plain_name(model)
    if options.get("tied") and mend:
        assert fleet_mends.count_tied_weights_once(model) == 1
    if options.get("sequence") and options.get("mark", True):
        names = ("norm.weight", "norm.bias", "down.bias")
        marked = fleet_mends.mark_sequence_parallel(model, lambda name, _: name.endswith(names), MICROS)
        assert marked
    if not mend:
        whole = fleet.fleet._user_defined_strategy  # read when the model is placed
        whole.pipeline_configs = {**whole.pipeline_configs, "enable_partial_send_recv": True}
    placed = fleet.distributed_model(model)
    update = fleet.distributed_optimizer(tiny.make_optimizer(optimizer, model.parameters()))
    losses = []
    for batch in tiny.batches():
        inputs, targets = (paddle.to_tensor(own_samples(one, hcg)) for one in batch)
        if options.get("pipeline", 1) > 1:
            loss = placed.train_batch([inputs, targets], update)
        else:
            loss = step(placed, update, loss_of, (inputs, targets), hcg, mend)
        losses.append(mean(loss, hcg, options.get("pipeline", 1) * options.get("tensor", 1)))
    return losses, parameters


def step(placed: Any, update: Any, loss_of: Any, batch: Any, hcg: Any, mend: bool) -> Any:
    """One update from two micro-batches; the whole loss of this rank's samples."""
    total = paddle.zeros([])
    for inputs, targets in zip(*(paddle.split(one, MICROS) for one in batch), strict=True):
        loss = loss_of(placed(inputs), targets) / MICROS
        (fleet_mends.scale_for_sequence_axis(loss, hcg) if mend else loss).backward()
        total += loss.detach()
    update.step()
    if mend:
        fleet_mends.clear_gradients(placed.parameters())
    else:
        update.clear_grad()
    return total


def own_samples(whole: Any, hcg: Any) -> Any:
    """This rank's rows of a global batch, and its shard of the sequence."""
    data, sharding = hcg.get_data_parallel_rank(), hcg.get_sharding_parallel_rank()
    shards = hcg.get_sharding_parallel_world_size()
    rows = np.split(whole, hcg.get_data_parallel_world_size() * shards)[data * shards + sharding]
    return np.split(rows, hcg.get_sep_parallel_world_size(), axis=1)[hcg.get_sep_parallel_rank()]


def mean(loss: Any, hcg: Any, copies: int) -> float:
    """The mean over the ranks, `copies` of which hold the same share."""
    assert dist.get_world_size() % copies == 0
    loss = loss.detach().reshape([1]).clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()
