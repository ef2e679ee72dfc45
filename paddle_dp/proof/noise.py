"""Measures one process's noise: the same steps with changes of the size of rounding.

Another number of ranks only changes the order of sums. Each of these changes has that effect on one process:

    weights      every weight times 1 ± one unit in its last place, with random signs
    permuted     the samples of each micro-batch in another order
    shares       every matrix product and convolution in shares of its rows, as ranks compute it, concatenated
    blocks       every linear's and convolution's weight in blocks; their products are summed and concatenated

`shares` and `blocks` are for precisions that round each product: the sum of N rounded gradients is not the rounded sum,
and tensor ranks round each slice's product before the sum. `blocks` is used only if a compared side has tensor ranks.
In bfloat16 it is nearly the only noise within a sample: a float32 unit in the last place seldom changes a rounded
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, partialmethod, reduce
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from paddle_dp.axes.tensor.convolutions import CONVOLUTIONS, channel_dim, instead, is_grouped, with_bias
from paddle_dp.batch import Batch
from paddle_dp.core.precision import ROUNDED
from paddle_dp.data.sampler import cut
from paddle_dp.proof.tolerance import arithmetic_eps


@dataclass(frozen=True)
class Noise:
    """A kind of noise: a change of the model before it is placed, and an order for each micro-batch's samples."""

    name: str
    change: Callable[[nn.Layer], Any] = lambda model: None
    order: Callable[[int], np.ndarray] | None = None  # number of samples → permutation
    all_steps: bool = False  # whether to run the later steps, too


def kinds(dtype: str, ranks: int, tensor: int = 1) -> Iterator[Noise]:
    """The runs with noise for one precision, against N = `ranks` ranks, at most `tensor` of them on the tensor axis."""
    for seed in (1, 2):
        yield Noise(f"weights {seed}", partial(nudge, dtype=dtype, seed=seed), all_steps=True)
    for seed in (1, 2):
        yield Noise(f"permuted {seed}", order=_shuffled(seed), all_steps=True)
    if dtype in ("bfloat16", "float16"):
        for count, order in ((ranks, None), (ranks + 1, None), (ranks, _shuffled(3))):
            also = "" if order is None else ", permuted"
            yield Noise(
                f"shares {count}{also}", partial(in_shares, count=count), order, all_steps=order is None
            )
        for count in (tensor, tensor + 1) if tensor > 1 else ():
            yield Noise(f"blocks {count}", partial(in_blocks, count=count), all_steps=True)


def nudge(model: nn.Layer, dtype: str, seed: int) -> None:
    """Multiplies every weight with 1 ± one unit in the last place, in place; signs are drawn from `seed`."""
    draw, ulp = np.random.default_rng(seed), arithmetic_eps(dtype)  # weights are float32 at least
    with paddle.no_grad():
        for parameter in model.parameters():
            if parameter.dtype in (paddle.float32, paddle.float64):
                old = parameter.numpy()
                signs = draw.integers(0, 2, old.shape, np.int8).astype(old.dtype) * 2 - 1
                moved = old * (1 + old.dtype.type(ulp) * signs)
                parameter.set_value(np.asarray(moved, old.dtype))  # NumPy turns a 0-d array into a number


def _shuffled(seed: int) -> Callable[[int], np.ndarray]:
    return lambda samples: np.random.default_rng((seed, samples)).permutation(samples)


def permute(batch: Batch, order: Callable[[int], np.ndarray]) -> Batch:
    """The batch with reordered samples in each micro-batch; each sample keeps its dropout mask."""
    micro_batches = []
    for micro_batch in batch.micro_batches:
        if micro_batch.is_dummy:
            micro_batches.append(micro_batch)
            continue
        moved = order(micro_batch.samples)
        at = paddle.to_tensor(moved)
        read = [micro_batch.inputs, micro_batch.targets]
        inputs, targets = paddle.utils.map_structure(lambda t: t[at], read)  # noqa: B023 - now
        positions = tuple((micro_batch.first + moved).tolist())
        micro_batches.append(replace(micro_batch, inputs=inputs, targets=targets, places=positions))
    return replace(batch, micro_batches=tuple(micro_batches))


def in_shares(model: nn.Layer, count: int) -> None:
    """Makes every product and convolution of a model compute its rows in `count` shares, one after another, in place.

    Other layers, such as BatchNorm, still get all samples.
    """
    for layer in model.sublayers(include_self=True):
        if isinstance(layer, ROUNDED):
            kind = type(layer)
            called = partialmethod(_in_shares, kind, count)
            layer.__class__ = type(kind.__name__, (kind,), {"__call__": called})


def _in_shares(layer: Any, kind: Any, count: int, /, x: paddle.Tensor, *more: Any, **named: Any) -> Any:
    """`kind.__call__`, hooks included, once per share: so each share's gradient is rounded, like a rank's."""
    bounds = [cut(x.shape[0], index, count) for index in range(count)]
    outputs = [kind.__call__(layer, x[a:b], *more, **named) for a, b in bounds if b > a]
    return outputs[0] if len(outputs) == 1 else paddle.concat(outputs)


def in_blocks(model: nn.Layer, count: int) -> None:
    """Makes every linear and convolution compute with `count` × `count` blocks of its weight, in place.

    Products of blocks of inputs are summed, as on row-parallel ranks. Products of blocks of outputs are concatenated,
    so that their inputs' gradients are summed, as on column-parallel ranks.
    """
    for layer in model.sublayers(include_self=True):
        kind = type(layer)
        if isinstance(layer, nn.Linear):
            blocks = partialmethod(_in_blocks, count)
        elif isinstance(layer, CONVOLUTIONS) and not is_grouped(layer):
            blocks = partialmethod(_by_channels, kind, count)
        else:
            continue
        layer.__class__ = type(kind.__name__, (kind,), {"forward": blocks})


def _in_blocks(layer: nn.Linear, count: int, x: paddle.Tensor) -> paddle.Tensor:
    weight, bias = layer.weight, layer.bias
    rows, columns = ([cut(size, index, count) for index in range(count)] for size in weight.shape)
    outputs = []
    for a, b in columns:
        products = [F.linear(x[..., c:d], weight[c:d, a:b]) for c, d in rows if d > c]
        total = reduce(paddle.add, products)
        outputs.append(total if bias is None else total + bias[a:b])
    return paddle.concat([output for output in outputs if output.shape[-1]], axis=-1)


def _by_channels(layer: Any, kind: type[nn.Layer], count: int, x: paddle.Tensor) -> paddle.Tensor:
    weight, bias, dim = layer.weight, layer.bias, channel_dim(layer)
    outputs, inputs = ([cut(size, index, count) for index in range(count)] for size in weight.shape[:2])
    slices = [(paddle.slice(x, [dim], [c], [d]), c, d) for c, d in inputs if d > c]
    sums = []
    for a, b in outputs:
        products = []
        for channels, c, d in slices if b > a else []:
            with instead(layer, weight=weight[a:b, c:d], bias=None):
                products.append(kind.forward(layer, channels))
        sums += [reduce(paddle.add, products)] if products else []
    return with_bias(layer, paddle.concat(sums, axis=dim), bias)
