"""A model as the operators of its forward, and the seconds and bytes of a step that follow from them.

For a model whose settings do not say what it computes: a convolutional network, an MLP, a transformer of another build.
`model.traced` reads the operators. Their kernels take time by the same roofline as a transformer's (`kernel_time`), and
the exchanges are the same (`step_time`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from math import prod

import numpy as np

from paddle_dp.plan.activations import LOGIT_PEAK, recomputed_blocks
from paddle_dp.plan.candidates import Candidate, Numerics, workload_of
from paddle_dp.plan.devices import Device
from paddle_dp.plan.kernel_time import HOST_OPERATORS, LOSS_BYTES, Rates, filled
from paddle_dp.plan.pipeline_schedule import stage_bounds
from paddle_dp.plan.step_time import StageWork, StepTime, assembled, data_rate, ring_seconds
from paddle_dp.plan.transformer import Transformer
from paddle_dp.plan.workload import Numbers, Workload
from paddle_dp.units import Recompute

# Numbers that pass through memory for each one that an operator without a product reads or writes in forward: backward
# reads the gradient and the values that forward kept, and writes a gradient.
BACKWARD = 1.5
# The same of a BatchNorm, for each number of its input, forward and backward: of Paddle's kernel, which reads the input
# twice, and of `core.batch_norm.SyncBatchNorm`, which computes in float32 by several kernels.
LOCAL_NORM = (3.0, 5.0)
SYNC_NORM = (8.0, 10.0)  # in float32
SYNC_CASTS = 12.0  # bytes, in addition, if its input has 16 bits: to 32 and back, read and written
SYNC_SAVED = 4  # bytes of a number of its input, which it keeps in float32


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator of the forward of one sample.

    `block`: the number of the block that runs it. `product`: `count` products of [m, k] and [k, n] by (m, n, k), or
    None. `read`, `written`: the numbers of its inputs and outputs; `weights`: of its parameters, and of values that
    it reads or writes once for all samples. `saved`: numbers that this operator alone keeps for backward;
    `masks`: bytes of the same that are no floating-point numbers. `channels`: of a BatchNorm, else 0. `gradients`: how
    many of its first two inputs have a gradient: a product for each in backward; 0: it has no backward.
    """

    name: str
    block: int
    read: float
    written: float
    weights: float = 0.0
    saved: float = 0.0
    masks: float = 0.0
    product: tuple[float, float, float] | None = None
    count: float = 1.0
    channels: int = 0
    gradients: int = 2

    @property
    def flops(self) -> float:
        """FLOPs of its products in forward; a multiply and an add count as two."""
        return 2 * self.count * prod(self.product) if self.product else 0.0


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """A model's operators in the order of its forward. `handed`: numbers of a sample that each of its blocks hands to
    the next one, and so one fewer than blocks; `weights`: the trained numbers of each block. `outputs`: the numbers
    that the forward gives for one sample, of which a loss is computed. `inputs` describes a sample:
    "float32[3, 224, 224]"."""

    operators: tuple[Operator, ...]
    handed: tuple[float, ...]
    weights: tuple[int, ...]
    outputs: float
    inputs: str

    @property
    def blocks(self) -> int:
        """The number of ordered blocks: 1 for a model without."""
        return len(self.weights)

    @property
    def has_norms(self) -> bool:
        return any(operator.channels for operator in self.operators)

    @property
    def flops(self) -> float:
        """FLOPs of one sample's forward and backward, nothing recomputed: products alone, and in backward one for each
        gradient, of which a frozen weight and the model's input have none."""
        return sum((1 + operator.gradients) * operator.flops for operator in self.operators)

    @cached_property
    def columns(self) -> dict[str, Numbers]:
        """The operators' numbers, [operators] each; a product's sides are 1 where there is none."""
        rows = self.operators
        sides = np.array([row.product or (1.0, 1.0, 1.0) for row in rows], float).reshape(-1, 3).T
        names = ("block", "read", "written", "weights", "saved", "masks", "count", "channels", "gradients")
        columns = {name: np.array([getattr(row, name) for row in rows], float) for name in names}
        is_product = np.array([row.product is not None for row in rows], float)
        return columns | {"m": sides[0], "n": sides[1], "k": sides[2], "is_product": is_product}

    def by_block(self, numbers: Numbers) -> Numbers:
        """The sums of the operators' numbers over each block, [blocks]."""
        numbers_of_blocks = self.columns["block"].astype(int)
        sums: Numbers = np.bincount(numbers_of_blocks, weights=numbers, minlength=self.blocks).astype(float)
        return sums

    def activation_bytes(
        self,
        stages: Sequence[Sequence[int]],
        samples: int,
        recompute: Recompute,
        in_flight: float,
        number: int,
        is_sync: bool,
    ) -> float:
        """Bytes on a rank with these blocks, at the peak: what `samples` of each of `in_flight` micro-batches keep, and
        the gradients at the widest operator or at the loss. `number`: bytes of one activation; `is_sync`: BatchNorms
        exchange."""
        local = [block for stage in stages for block in stage]
        recomputed = [block for block in local if block in recomputed_blocks(self.blocks, recompute)]
        saved = self.by_block(number * self.columns["saved"] + self.columns["masks"])
        if is_sync:
            normed = self.by_block(self.columns["read"] * (self.columns["channels"] > 0))
            saved += max(0, SYNC_SAVED - number) * normed
        inputs = number * np.array([0.0, *self.handed])
        waiting = saved[local].sum() - saved[recomputed].sum() + inputs[recomputed].sum()
        repeated = saved[recomputed].max() if recomputed else 0.0  # of the block that is in backward now
        wide = self.columns["read"] + self.columns["written"]
        here = np.isin(self.columns["block"], local)
        widest = number * float(wide[here].max()) if here.any() else 0.0
        scores = LOGIT_PEAK * self.outputs if self.blocks - 1 in local else 0.0
        return float(samples * (in_flight * waiting + repeated + max(widest, scores)))


@dataclass(frozen=True, kw_only=True)
class _BlockTimes:
    """Seconds of each block for one micro-batch, [blocks]: products and elementwise, forward and backward; `host`,
    `host_backward`: in which one process launches their kernels."""

    products: Numbers
    elementwise: Numbers
    products_backward: Numbers
    elementwise_backward: Numbers
    host: Numbers
    host_backward: Numbers


def block_times(
    model: TracedModel, micro: int, load: Workload, numerics: Numerics, rates: Rates, is_sync: bool
) -> _BlockTimes:
    """Seconds of each block for `micro` samples on the device of the (first) layout in `load`; `is_sync`: BatchNorms
    compute their statistics over all ranks."""
    c, number = model.columns, float(numerics.number)
    memory = float(load.memory_rate[0]) * rates.memory
    with_weights = c["weights"] > 0  # samples are further rows of one product, else further products
    m = np.where(with_weights, c["m"] * micro, c["m"])
    count = np.where(with_weights, c["count"], c["count"] * micro)
    rate = float(load.peak[0]) * rates.gemm * filled(m, c["n"], c["k"], rates.side)
    arithmetic = 2 * m * c["n"] * c["k"] * count / rate
    moved = number * (micro * (c["read"] + c["written"]) + c["weights"]) / memory
    casts = float(load.cast[0]) * c["weights"] / memory
    products = np.maximum(arithmetic, moved) + rates.gap
    is_norm = c["channels"] > 0
    forward, backward = norm_bytes(number, is_sync)
    host = rates.host / HOST_OPERATORS
    read = micro * c["read"]
    elementwise = np.where(is_norm, read * forward / memory, moved) + rates.gap
    elementwise_backward = np.where(is_norm, read * backward / memory, BACKWARD * moved) + rates.gap
    is_product, is_trained = c["is_product"] == 1, c["gradients"] > 0
    moved_backward = model.by_block(np.where(is_product | ~is_trained, 0.0, elementwise_backward))
    moved_backward[-1] += micro * model.outputs * LOSS_BYTES / memory
    return _BlockTimes(
        products=model.by_block(np.where(is_product, products + casts, 0.0)),
        elementwise=model.by_block(np.where(is_product, 0.0, elementwise)),
        products_backward=model.by_block(
            np.where(is_product & is_trained, c["gradients"] * products + casts, 0.0)
        ),
        elementwise_backward=moved_backward,
        host=host * model.by_block(np.ones(len(m))),
        host_backward=2 * host * model.by_block(is_trained.astype(float)),
    )


def norm_bytes(number: float, is_sync: bool) -> tuple[float, float]:
    """Bytes that a BatchNorm moves for each number of its input, forward and backward; `number`: bytes of one."""
    if not is_sync:
        return LOCAL_NORM[0] * number, LOCAL_NORM[1] * number
    wide, casts = max(number, 4.0), SYNC_CASTS if number < 4 else 0.0
    return SYNC_NORM[0] * wide + casts, SYNC_NORM[1] * wide + casts


def traced_step_time(
    model: TracedModel,
    choices: Sequence[Candidate],
    device: Device,
    numerics: Numerics,
    rates: Rates,
) -> StepTime:
    """The forecast of each layout.

    For the exchanges the model is blocks of one token, as wide as the most that a block hands to the next.
    """
    stand_in = Transformer(
        depth=model.blocks, width=round(max(model.handed, default=1.0)), heads=1, kv_heads=1, head_width=1, hidden=1,
        matrices=2, vocab=0, length=1, tables=0,
    )  # fmt: skip
    load = workload_of(stand_in, choices, device, replace(numerics, update_flops=0.0))
    times = cache(lambda micro, is_sync: block_times(model, micro, load, numerics, rates, is_sync))
    rows = []
    weights = np.array(model.weights, float)
    for choice in choices:
        is_sync = numerics.sync_norms and choice.degrees.dp_size > 1
        rows.append(_stages(model, choice, times(choice.micro, is_sync), weights))
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    update = columns.pop("weights")
    mean = columns.pop("mean")
    slowest = {name: columns[name] for name in ("products", "elementwise", "host")}
    if numerics.sync_norms:
        slowest["norms"] = _norm_seconds(model, load, rates)
    share = update / max(weights.sum(), 1.0)
    work = StageWork(
        slowest=slowest, stage=mean, tail=np.zeros(len(choices)), weights=update,
        update_products=share * numerics.update_flops * load.peak / device.peak32,
    )  # fmt: skip
    return assembled(load, work, rates)


def _stages(model: TracedModel, choice: Candidate, times: _BlockTimes, weights: Numbers) -> dict[str, float]:
    """Seconds of a micro-batch on the pipeline's slowest rank by kind, `mean` of all; and the most `weights` of one."""
    recomputed = recomputed_blocks(model.blocks, choice.recompute)
    repeats = np.isin(np.arange(model.blocks), recomputed).astype(float)
    products = times.products * (1 + repeats) + times.products_backward
    elementwise = times.elementwise * (1 + repeats) + times.elementwise_backward
    forward = times.products + times.elementwise
    pipeline = choice.degrees.pipeline
    rank_of_block = np.zeros(model.blocks, int)
    bounds = stage_bounds((1,) * model.blocks, pipeline * choice.virtual_stages)
    for stage, (first, end) in enumerate(pairwise(bounds)):
        rank_of_block[first:end] = stage % pipeline

    def by_rank(numbers: Numbers) -> Numbers:
        sums: Numbers = np.bincount(rank_of_block, weights=numbers, minlength=pipeline).astype(float)
        return sums

    ahead, back = by_rank(forward), by_rank(products + elementwise - forward)
    host, host_backward = by_rank(times.host), by_rank(times.host * repeats + times.host_backward)
    waits = np.maximum(0.0, host - ahead) + np.maximum(0.0, host_backward - back)
    total = ahead + back + waits
    slowest = int(np.argmax(total))
    return {
        "products": by_rank(products)[slowest], "elementwise": by_rank(elementwise)[slowest], "host": waits[slowest],
        "mean": float(total.mean()), "weights": float(by_rank(weights).max()),
    }  # fmt: skip


def _norm_seconds(model: TracedModel, load: Workload, rates: Rates) -> Numbers:
    """Seconds of the exchanges of one micro-batch's BatchNorms on a stage in the mean, with two float32 numbers of each
    channel: gathered in forward (half a ring) and summed in backward, over all ranks that read samples."""
    ranks = load.data * load.sequence
    rate = data_rate(load, rates)
    seconds = np.zeros(len(load))
    for operator in model.operators:
        if operator.channels:
            seconds += 1.5 * ring_seconds(np.full(len(load), 8.0 * operator.channels), ranks, rate, rates)
    return seconds / load.pipeline
