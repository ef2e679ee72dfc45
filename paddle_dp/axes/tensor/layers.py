"""Replaces layers of a plain model with fleet's tensor-parallel layers, according to the `cuts` tables.

Initial weights and names are the same as on one process: a rank slices the full weights or, if these have no memory yet
(`model.initial_weights`), registers its slices.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import paddle
from paddle import nn
from paddle.distributed.fleet.layers.mpu import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    mp_ops,
)
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    ColumnSequenceParallelLinear,
    mark_as_sequence_parallel_parameter,
)

from paddle_dp.axes.tensor import convolutions
from paddle_dp.axes.tensor.rng import draw_slice
from paddle_dp.axes.tensor.shared_input import copied
from paddle_dp.core import lora
from paddle_dp.core.data_group import Group
from paddle_dp.core.placement import Placements, Shard
from paddle_dp.core.precision import default_dtype
from paddle_dp.errors import UsageError
from paddle_dp.model.initial_weights import InitialWeights
from paddle_dp.part.annotation import attention_methods_of, cut_entries

DROPOUTS = (nn.Dropout, nn.AlphaDropout)
CHANNEL_DROPOUTS = (*DROPOUTS, nn.Dropout2D, nn.Dropout3D, nn.FeatureAlphaDropout)


class CopyToTensorParallel(nn.Layer):
    """A layer with sharded outputs: its input is the same on all ranks, and the input's gradients are all-reduced."""

    def __init__(self, layer: nn.Layer, group: Group):
        super().__init__()
        self.group = group
        for name, parameter in layer.named_parameters(include_sublayers=False):
            self.add_parameter(name, parameter)
        # A list keeps it from being a sublayer: its parameters are registered here already.
        self._layer = [layer]

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self._layer[0](copied(x, self.group))


class ColwiseLinear(ColumnParallelLinear):
    """The same input on all ranks → some of the outputs; layers with the same input share one exchange."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.linear(copied(x, self.model_parallel_group), self.weight, self.bias)


def before_exchanges(model: nn.Layer) -> set[int]:
    """The ids of parameters with gradients that are final just before the layer exchanges its input's gradients."""
    kinds = (ColumnParallelLinear, ColumnSequenceParallelLinear, CopyToTensorParallel)
    layers = (
        layer
        for layer in model.sublayers(include_self=True)
        if isinstance(layer, kinds) or layer in convolutions.copying
    )
    return {id(parameter) for layer in layers for parameter in layer.parameters(include_sublayers=False)}


class TensorParallelizer:
    """Shards layers for one rank of the tensor axis; a parameter that two layers share is sharded once.

    The shards are recorded in `placements`. Afterwards `cuts_classes` is true if each rank's scores hold only some
    classes. `initial`: provides the values of weights without memory.
    """

    kinds: tuple[Any, Any, Any] = (ColwiseLinear, RowParallelLinear, CopyToTensorParallel)

    def __init__(self, group: Group, placements: Placements, initial: InitialWeights | None = None):
        self.group, self.placements, self.cuts_classes = group, placements, False
        self.initial = initial
        self._sharded: dict[int, paddle.Tensor] = {}
        self._cut: dict[tuple[int, str], tuple[Any, Any]] = {}  # by id and way: a layer, the one in its place

    def parallelize(self, model: nn.Layer) -> nn.Layer:
        """Replaces, in place, every layer that a `cuts` table names. Raises UsageError if no table names any."""
        if not self.replace(model):
            raise UsageError(
                f"strategy.tensor: {type(model).__name__} has no `cuts` table, so it cannot be split over the tensor "
                "axis. Give its layers one (docs/add-a-part.md), or set strategy.tensor=1."
            )
        self._check_shared(model)
        return model

    def _check_shared(self, model: nn.Layer) -> None:
        """Raises UsageError if another layer still has the whole of a weight that was cut: they would be two."""
        for name, parameter in model.named_parameters():
            if id(parameter) in self._sharded and self.placements.placement_of(parameter).shard is None:
                raise UsageError(
                    f"strategy.tensor: '{name}' is whole, but it is also the weight of another layer, which is cut. "
                    "Cut both along one dim, or leave both whole."
                )

    def replace(self, model: nn.Layer, within: frozenset[int] | None = None) -> bool:
        """Replaces the layers that the model's `cuts` tables name; returns whether there were any.

        Attention with sharded heads draws these heads' masks. `within`: only entries of these layers (`layers_in`).
        """
        replaced = False
        for parent in model.sublayers(include_self=True):
            cuts_heads = False
            for cut in cut_entries(parent):
                placed = parent if isinstance(cut.value, int) else cut.value
                if within is None or id(placed) in within:
                    setattr(parent, cut.name, self._cut_once(cut.value, cut.way))
                    replaced, cuts_heads = True, cuts_heads or cut.way == "heads"
            if cuts_heads:
                draw_slice(parent, "heads", self.group, *_attention_methods(parent))
        return replaced

    def _cut_once(self, full: Any, way: str) -> Any:
        """Cuts a number or a layer; one with two names once, for its channels would be cut twice."""
        if (key := (id(full), way)) not in self._cut:
            check_cuttable(full, way)
            with self._memory():
                self._cut[key] = full, WAYS[way](self, full)
        return self._cut[key][1]

    def _memory(self) -> AbstractContextManager[Any]:
        """Wraps the creation of layers, which allocates no weights if the model has none."""
        return nullcontext() if self.initial is None else paddle.LazyGuard()

    def colwise(self, full: Any) -> Any:
        """Shards a linear's outputs, a dropout's masks, or a number (`num_heads`). Raises UsageError if the ranks do
        not divide the size."""
        if isinstance(full, int):
            self._check_divides(full, "heads")
            return full // self.group.nranks
        if isinstance(full, DROPOUTS):
            draw_slice(full, "colwise", self.group, "forward")
            return full
        self._check_divides(full.weight.shape[1], "outputs")
        with default_dtype(full.weight.dtype):
            layer = self.kinds[0](
                full.weight.shape[0], full.weight.shape[1], has_bias=full.bias is not None, gather_output=False,
                mp_group=self.group,
            )  # fmt: skip
        self._take(layer, "weight", full.weight, 1)
        if full.bias is not None:
            self._take(layer, "bias", full.bias, 0)
        self._adapt(full, layer, {lora.A: None, lora.B: 1}, self._copied)
        return layer

    def rowwise(self, full: Any) -> nn.Layer:
        """Shards the inputs of a linear or a convolution; the ranks' products are summed over the axis."""
        if isinstance(full, convolutions.CONVOLUTIONS):
            return self._summed_convolution(full)
        self._check_divides(full.weight.shape[0], "inputs")
        with default_dtype(full.weight.dtype):
            layer = self.kinds[1](
                full.weight.shape[0], full.weight.shape[1], has_bias=full.bias is not None,
                input_is_parallel=True, mp_group=self.group,
            )  # fmt: skip
        self._take(layer, "weight", full.weight, 0)
        if full.bias is not None:
            layer.bias = full.bias
        self._adapt(full, layer, {lora.A: 0, lora.B: None}, self._summed)
        return layer

    def channels(self, full: Any) -> nn.Layer:
        """Shards the channels of a convolution's outputs, of a BatchNorm, or of a dropout's masks. Raises UsageError
        for other layers."""
        if isinstance(full, CHANNEL_DROPOUTS):
            last = getattr(full, "data_format", "NCHW").endswith("C")
            draw_slice(full, "colwise" if last else "channels", self.group, "forward")
            return full
        if not convolutions.has_channels(full):
            raise UsageError(
                f"strategy.tensor: `channels` is for convolutions, BatchNorms and dropouts, and {type(full).__name__} "
                "is none. Leave it whole, or cut the layer before it otherwise."
            )
        self._check_tokens_unsplit(full)
        self._check_divides(
            convolutions.channels_of(full), "groups" if convolutions.is_grouped(full) else "channels"
        )
        for name in [name for name, _ in full.named_parameters(include_sublayers=False)]:
            self._slice(full, name, convolutions.OUTPUTS)
        if isinstance(full, convolutions.CONVOLUTIONS):
            convolutions.takes_all(full, self.group)
        return cast(nn.Layer, full)

    def _summed_convolution(self, full: Any) -> nn.Layer:
        self._check_tokens_unsplit(full)
        if convolutions.is_grouped(full):
            raise UsageError(
                "strategy.tensor: a convolution of several groups does not sum over all of its inputs, so that "
                "`rowwise` cannot cut it. Where the channels before it are cut, cut it as `channels`."
            )
        self._check_divides(full.weight.shape[convolutions.INPUTS], "inputs")
        self._slice(full, "weight", convolutions.INPUTS)
        convolutions.sums(full, self.group)
        return cast(nn.Layer, full)

    def _check_tokens_unsplit(self, full: nn.Layer) -> None:
        """Raises UsageError if activations are sequence shards."""

    def per_head(self, full: nn.Layer) -> nn.Layer:
        """Keeps a layer whole that treats each head alike, such as a norm of q: it works on this rank's heads, and the
        marked gradients are summed over the axis (`axes.axes_exchange`)."""
        for parameter in full.parameters():
            mark_as_sequence_parallel_parameter(parameter)
        return full

    def vocab(self, full: nn.Layer) -> nn.Layer:
        """Shards the vocabulary of an embedding, of a linear's outputs, or of outputs tied to an embedding."""
        if isinstance(full, nn.Embedding):
            self._check_divides(full.weight.shape[0], "words")
            with default_dtype(full.weight.dtype):
                layer = VocabParallelEmbedding(*full.weight.shape, mp_group=self.group)
            self._take(layer, "weight", full.weight, 0)
            return layer
        if isinstance(full, nn.Linear):
            return self.classes(full)
        self._check_divides(full.weight.shape[0], "classes")
        self._slice(full, "weight", 0)
        return self._cut_classes(full, "weight")

    def classes(self, full: nn.Layer) -> nn.Layer:
        """Shards classes: a slice along the last dim of every parameter of the layer."""
        if isinstance(full, nn.Linear):
            self.cuts_classes = True
            return self.colwise(full)
        return self._cut_classes(full)

    def _cut_classes(self, full: nn.Layer, *cut_already: str) -> nn.Layer:
        self.cuts_classes = True
        for name, parameter in list(full.named_parameters(include_sublayers=False)):
            if name in cut_already:
                continue
            self._check_divides(parameter.shape[-1], "classes")
            self._slice(full, name, parameter.ndim - 1)
        return self.kinds[2](full, self.group)

    def _adapt(
        self, full: nn.Linear, layer: nn.Layer, dims: dict[str, int | None], between: lora.Between
    ) -> None:
        """Moves the full layer's adapter, if it has one, to the sharded layer, with slices along `dims`."""
        low_rank = lora.low_rank_of(full)
        if low_rank is None:
            return
        for factor_name, dim in dims.items():
            factor = getattr(full, factor_name)
            if dim is None:
                layer.add_parameter(factor_name, factor)
                continue
            layer.add_parameter(factor_name, factor)
            self._slice(layer, factor_name, dim)
        lora.LowRank(low_rank.scale, between).attach(layer)

    def _copied(self, narrow: paddle.Tensor) -> paddle.Tensor:
        """x A of a colwise layer, the same on all ranks. Its gradients, one per rank's columns of B, are
        all-reduced."""
        return mp_ops._c_identity(narrow, group=self.group)

    def _summed(self, narrow: paddle.Tensor) -> paddle.Tensor:
        """x A of a rowwise layer: the sum over the ranks' rows of A."""
        return mp_ops._mp_allreduce(narrow, group=self.group)

    def _check_divides(self, size: int, noun: str) -> None:
        """Raises UsageError unless the number of ranks divides `size`."""
        if size % self.group.nranks:
            raise UsageError(
                f"strategy.tensor: {self.group.nranks} ranks do not divide the {size} {noun} of a layer that is cut. "
                "Choose another strategy.tensor, or leave the layer whole."
            )

    def _slice(self, layer: nn.Layer, name: str, dim: int) -> None:
        """Replaces a parameter with this rank's slice."""
        full = getattr(layer, name)
        if id(full) not in self._sharded:
            shape = [size // self.group.nranks if at == dim else size for at, size in enumerate(full.shape)]
            setattr(layer, name, layer.create_parameter(shape, dtype=full.dtype))
        self._take(layer, name, full, dim)

    def _take(self, layer: nn.Layer, name: str, full: paddle.Tensor, dim: int) -> None:
        """Sets a parameter of `layer` to this rank's slice of the full one, under the same name. Raises UsageError if
        another layer shares it, and has slices along another dim."""
        shard = Shard(dim, self.group.rank, self.group.nranks)
        if (cut_before := self._sharded.get(id(full))) is not None:
            if self.placements.placement_of(cut_before).shard != shard:
                raise UsageError(
                    f"strategy.tensor: two layers share a weight {list(full.shape)}, and their `cuts` slice it along "
                    "different dims. Cut both along one dim, or leave both whole."
                )
            setattr(layer, name, cut_before)
            return
        sliced = getattr(layer, name)
        if self.initial is not None and self.initial.has(full):
            self.initial.cut(sliced, full, shard)
        else:
            with paddle.no_grad():
                sliced.set_value(shard.cut(full))
        sliced.name, sliced.is_distributed = full.name, True
        self.placements.record(sliced, shard=shard)
        sliced.stop_gradient = full.stop_gradient
        sliced.optimize_attr, sliced.regularizer = full.optimize_attr, full.regularizer
        sliced.need_clip = full.need_clip
        self._sharded[id(full)] = sliced


def layers_in(block: nn.Layer) -> frozenset[int]:
    """The ids of a block and of all layers within it, for `TensorParallelizer.replace`."""
    return frozenset(map(id, block.sublayers(include_self=True)))


def _attention_methods(layer: nn.Layer) -> tuple[str, ...]:
    """The methods in which a layer's attention draws masks; for Paddle's attention its forward."""
    return attention_methods_of(layer) or (("forward",) if isinstance(layer, nn.MultiHeadAttention) else ())


WAYS: dict[str, Callable[[TensorParallelizer, Any], Any]] = {
    "colwise": TensorParallelizer.colwise,
    "heads": TensorParallelizer.colwise,  # outputs are ordered by heads, so whole heads are a slice of columns
    "per_head": TensorParallelizer.per_head,
    "rowwise": TensorParallelizer.rowwise,
    "channels": TensorParallelizer.channels,
    "classes": TensorParallelizer.classes,
    "vocab": TensorParallelizer.vocab,
}
UNREPLACED = ("per_head", "channels")  # ways that replace no layer


def check_cuttable(layer: Any, way: str) -> None:
    """Raises UsageError for a layer that would learn something else as a cut one."""
    if why := _uncuttable(layer, way):
        raise UsageError(f"strategy.tensor: {why}. Leave it whole, or set strategy.tensor=1.")


def _uncuttable(layer: Any, way: str) -> str:
    """Why fleet's sharded layer cannot take the place of this one; "" if it can."""
    if way == "vocab" and isinstance(layer, nn.Embedding):
        by_vocabulary = "an embedding with a {} cannot be cut by vocabulary, because fleet's {}"
        if layer._padding_idx is not None:
            return by_vocabulary.format("padding_idx", "updates the padding's row")
        if layer._max_norm is not None:
            return by_vocabulary.format("max_norm", "does not scale the rows that it reads")
        if layer._scale_grad_by_freq:
            return by_vocabulary.format("scale_grad_by_freq", "does not scale its gradients")
    kind, name = (nn.Embedding if isinstance(layer, nn.Embedding) else nn.Linear), type(layer).__name__
    if way in UNREPLACED or not isinstance(layer, (kind, *convolutions.CONVOLUTIONS)):
        return ""
    if "weight" not in dict(layer.named_parameters(include_sublayers=False)):
        return (
            f"the weight of a {name} that is cut as {way} is computed by a hook (weight_norm, spectral_norm)"
        )
    if not isinstance(layer, kind):
        return ""
    lacks = f"fleet's layer takes the place of a {name} that is cut as {way}, and lacks "
    if type(layer).forward is not kind.forward:
        return f"{lacks}its forward"
    hooks = (*layer._forward_pre_hooks.values(), *layer._forward_post_hooks.values())
    modules = (str(getattr(getattr(hook, "func", hook), "__module__", "")) for hook in hooks)
    # An adapter's, which the cut layer gets, or an earlier training's.
    return "" if all(m.startswith("paddle_dp.") for m in modules) else f"{lacks}the hooks on its forward"
