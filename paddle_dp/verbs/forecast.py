"""A recipe's layout, sizes and activations for the arithmetic of `plan`, without starting the job."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from paddle_dp.axes.meta_init import describe_weights
from paddle_dp.core.parameter_groups import group
from paddle_dp.errors import UsageError
from paddle_dp.part import adapted
from paddle_dp.plan.activations import ActivationFormat
from paddle_dp.plan.bound import WorkOrder
from paddle_dp.plan.exchange import Between
from paddle_dp.plan.fullest_rank import USABLE_MEMORY, rank_activations
from paddle_dp.plan.layout import Blocks, Layout, RankMemory, rank_memories
from paddle_dp.plan.legal import sample_length
from paddle_dp.plan.memory import Widths, states_of
from paddle_dp.plan.traced_model import TracedModel
from paddle_dp.plan.transformer import Transformer, transformer
from paddle_dp.recipe import Recipe
from paddle_dp.text import amount
from paddle_dp.verbs.traced_recipe import traced_recipe, weightless


def fitting(recipe: Recipe, ranks: int, limit: float) -> tuple[int, str]:
    """The smallest number of equal micro-batches with which every rank's weights, gradients, optimizer states and
    activations take at most `USABLE_MEMORY` of `limit` bytes, and a sentence. Raises UsageError if there is none, or if
    the activations are not known."""
    layout, blocks = layout_of(recipe, ranks), blocks_of(recipe)
    layout, blocks = recipe.strategy.config.assigned(recipe, layout, blocks, activation_bytes(recipe, layout))
    memories, model = rank_memories(blocks, layout), sizes_of(recipe, blocks)
    reading = [memory for memory in memories if layout.degrees.reads(memory.rank)]
    if any(activations(recipe, model, layout, blocks, memory) is None for memory in reading):
        raise UsageError(
            f"train.micro_batches=auto: what model {recipe.model.name} keeps for its backward is not known by "
            "arithmetic. Give a number: more of them take less memory."
        )
    if isinstance(model, TracedModel) and model.has_norms:
        raise UsageError(
            f"train.micro_batches=auto: BatchNorm, which model {recipe.model.name} has, takes the statistics of each "
            "micro-batch, so what is learned depends on their number. Give a number."
        )
    need, allowed = 0.0, f"{USABLE_MEMORY:.0%} of the {amount(limit)} that a rank has"
    batch, ramp = recipe.train.batch, recipe.train.batch_ramp
    most = min(max(batch // layout.degrees.dp_size, 1), ramp.start if ramp else batch)
    for divisor in (n for n in range(1, most + 1) if batch % n == 0):
        candidate = recipe.model_copy(update={"train": replace(recipe.train, micro_batches=divisor)})
        sizes = [(m, activations(candidate, model, layout, blocks, m)) for m in memories]
        if (size := max(memory.total + (size or 0.0) for memory, size in sizes)) > USABLE_MEMORY * limit:
            need = size
            continue
        with suppress(UsageError):  # a pipeline that needs another number
            layout_of(candidate, ranks)  # builds the model
            return divisor, f"a rank then takes {amount(size)}, at most {allowed}"
    raise UsageError(
        f"train.micro_batches=auto: with as many as there can be a rank takes {amount(need)}, more than {allowed}. "
        "Take more ranks, or split the model: paddle-dp check --ranks N shows what a layout takes."
    )


def grouped_model(recipe: Recipe) -> Any:
    """The recipe's model, adapted and grouped as in training."""
    model, before = adapted(recipe.model.build(), recipe.adapter, recipe.train.seed)
    group(model, recipe.optimizer.groups, before)
    return model


def blocks_of(recipe: Recipe) -> Blocks:
    """The weights of the recipe's model, grouped and adapted as in training, without memory for them."""
    with weightless(recipe):
        return describe_weights(grouped_model(recipe))


def layout_of(recipe: Recipe, ranks: int) -> Layout:
    """The layout of the recipe's strategy on `ranks` ranks. Raises UsageError if it cannot run."""
    precision, device = recipe.train.precision, _device(recipe, ranks)
    for callback in recipe.callbacks:
        callback.refuse(recipe, ranks, device)
    widths = Widths.for_states(
        states_of(recipe),
        low=precision.level == "O2" and precision.is_low and device != "cpu",
        double=precision.dtype == "float64",
    )
    layout: Layout = recipe.strategy.config.layout(ranks)
    return replace(layout, widths=widths, accelerator=device != "cpu")


def _device(recipe: Recipe, ranks: int) -> str:
    """The device that the strategy runs on: of `auto` an accelerator, if it can. Raises UsageError if it cannot run."""
    if recipe.train.device == "auto":
        with suppress(UsageError):
            recipe.strategy.refuse(recipe, ranks, "gpu")
            return "gpu"
    device = "cpu" if recipe.train.device in ("cpu", "auto") else "gpu"
    recipe.strategy.refuse(recipe, ranks, device)
    return device


def order_of(layout: Layout, micro_batches: int) -> WorkOrder:
    """The order of a rank's work in the layout."""
    return WorkOrder(
        micro_batches=micro_batches, stages=layout.degrees.pipeline, virtual_stages=layout.virtual_stages,
        schedule=layout.pipeline_schedule,
    )  # fmt: skip


@runtime_checkable
class TransformerSizes(Protocol):
    """The settings of a model for which activations can be estimated. It may also have `kv_heads`, where several heads
    of q share one of k and v, and `head_width`, where that is another than `width` / `heads` (None: it is not)."""

    width: int
    heads: int
    depth: int
    length: int
    vocab: int


def between(recipe: Recipe, layout: Layout) -> Between | None:
    """The activations between blocks for a step's samples on a rank; None unless the model is a transformer."""
    model = recipe.model.config
    if not isinstance(model, TransformerSizes):
        return None
    samples = -(-recipe.train.batch // layout.degrees.dp_size)
    kv_fraction = getattr(model, "kv_heads", model.heads) / model.heads
    head_width = getattr(model, "head_width", None)
    widths = model.heads * head_width / model.width if head_width else 1.0  # of q and of attention's output
    return Between(
        numbers=samples * sample_length(model, recipe.dataset.config) * model.width,
        bytes=activation_bytes(recipe, layout),
        attention=widths * (2 + 2 * kv_fraction),
    )


def activation_bytes(recipe: Recipe, layout: Layout) -> int:
    """Bytes of one activation. CPUs emulate low precision in float32."""
    low = 2 if layout.accelerator else 4
    return {"float64": 8, "float32": 4}.get(recipe.train.precision.dtype, low)


def activations(
    recipe: Recipe,
    model: Transformer | TracedModel | None,
    layout: Layout,
    blocks: Blocks,
    memory: RankMemory,
) -> float | None:
    """Bytes of activations on the rank, or on one of its devices, by the arithmetic of `plan`; None of a `model` whose
    sizes are not known (`sizes_of`), and on a server, which runs no layer."""
    if model is None or not layout.degrees.reads(memory.rank):
        return None
    if isinstance(model, TracedModel) and max(layout.degrees.tensor, layout.degrees.sequence) > 1:
        return None  # which of its tensors are cut is not known
    shares = recipe.train.micro_batches * layout.degrees.dp_size * layout.devices
    micro = (-(-recipe.train.batch // shares), recipe.train.micro_batches)
    return rank_activations(model, layout, memory, len(blocks), micro, activation_format(recipe, layout))


def activation_format(recipe: Recipe, layout: Layout) -> ActivationFormat:
    """The form of the activations. An accelerator is taken for one that has flash attention in 16 bits, as GPUs since
    A100: no device is known here."""
    number = activation_bytes(recipe, layout)
    return ActivationFormat(
        number=number, flash=number == 2, masked=masks_documents(recipe),
        sync_norms=bool(recipe.strategy.config.sync_batch_norm),
    )  # fmt: skip


def masks_documents(recipe: Recipe) -> bool:
    """Whether the samples are packed documents, which attention masks. Of a user's data set it is not known."""
    return bool(getattr(recipe.dataset.config, "masks_documents", False))


def sizes_of(recipe: Recipe, blocks: Blocks, dataset: Any = None) -> Transformer | TracedModel | None:
    """The sizes of the model with these blocks: exact for equal blocks of attention and an MLP, by the settings of
    another transformer, by the operators of another model (`traced_recipe`); None if these cannot be read."""
    config = recipe.model.config
    length = sample_length(config, recipe.dataset.config)
    sizes = transformer(config, length, blocks)
    if isinstance(sizes, Transformer):
        return sizes
    if isinstance(config, TransformerSizes):
        return Transformer(
            depth=config.depth, width=config.width, heads=config.heads, vocab=config.vocab, length=length, tables=2,
            kv_heads=getattr(config, "kv_heads", config.heads), hidden=getattr(config, "hidden", 0) or 4 * config.width,
            head_width=getattr(config, "head_width", None) or config.width // config.heads, matrices=2,
        )  # fmt: skip
    with suppress(UsageError):
        traced = traced_recipe(recipe, dataset)
        return traced if traced.blocks == len(blocks) else None
    return None
