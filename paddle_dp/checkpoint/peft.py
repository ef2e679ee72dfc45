"""LoRA adapters in PEFT's format: adapter_config.json, and adapter_model.safetensors with

    base_model.model.MODULE.lora_A.weight   [rank, inputs]    our A [inputs, rank], transposed
    base_model.model.MODULE.lora_B.weight   [outputs, rank]   our B [rank, outputs], transposed

for each module, named as in the published model (`checkpoint.other_names`). Our layer of q, k and v in one has one A
for their three modules: it is written three times, and read if the three are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_dp.checkpoint.other_names import (
    HUGGING_FACE,
    INNER,
    PYTORCH,
    Origin,
    Piece,
    Tables,
    Translated,
    names_of,
    renamed,
)
from paddle_dp.checkpoint.source import SafetensorsFile
from paddle_dp.checkpoint.tensors import WeightSource
from paddle_dp.errors import CheckpointError, UsageError
from paddle_dp.recipe.hf_config import read, wrong_keys
from paddle_dp.tensors import widened

if TYPE_CHECKING:
    from paddle import nn

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A, B = "lora_A", "lora_B"  # our names of the factors, and PEFT's
_PREFIX = "base_model.model."
# As in `recipe.hf_config`: a key that is none of these and neither empty nor false changes an adapter's result.
_KEYS: Mapping[str, Any] = {
    "sizes": {"r": "rank", "lora_alpha": "alpha"},
    "must": {
        "peft_type": ("LORA",), "bias": ("none",),
        # Others (pissa, olora, loftq, corda) change the weights that the adapter is added to.
        "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    },
    "unused": (
        "base_model_name_or_path", "revision", "task_type", "auto_mapping.*", "inference_mode", "peft_version",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out",
        "lora_dropout", "megatron_core", "qalora_group_size", "ensure_weight_tying", "eva_config.*",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class EqualPieces(Origin):
    """One tensor of the model that the source has several times."""

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        return self.pieces[0].shape(source)

    def read(self, source: WeightSource, offset: Any, shape: Any) -> np.ndarray:
        first, *others = (piece.read(source, offset, shape) for piece in self.pieces)
        if any(not np.array_equal(first, other) for other in others):
            raise UsageError(
                f"adapter.load: {' and '.join(self.names)} differ, and this model has one layer for all of them, with "
                "one A. Merge the adapter into its base with PEFT (merge_and_unload), and load that model."
            )
        return first

    def written(self, array: np.ndarray) -> dict[str, np.ndarray]:
        return {piece.name: piece.written(array) for piece in self.pieces}


def factor_origins(tables: Tables, convention: str, layers: Iterable[str], prefix: str) -> dict[str, Origin]:
    """The origins in PEFT's file of A and B of these layers, by our names."""
    origins: dict[str, Origin] = {}
    for layer in layers:
        weight = Origin.parse(tables.names[convention][f"{layer}.weight"])
        modules = [prefix + name.removesuffix(".weight") for name in weight.names]
        a, b = (tuple(Piece(f"{m}.{factor}.weight", transposed=True) for m in modules) for factor in (A, B))
        origins |= {f"{layer}.{A}": EqualPieces(a), f"{layer}.{B}": Origin(b, weight.head_width)}
    return origins


def read_sizes(folder: Path) -> tuple[int, float]:
    """Returns rank and alpha. Raises UsageError if the folder has no adapter_config.json that can be read, or for a key
    with which an adapter is more than W + alpha / rank × A B."""
    values = read(folder, CONFIG, "adapter.load")
    wrong = list(wrong_keys(values, _KEYS, "lora"))
    if (kind := values.get("peft_type")) != "LORA":
        wrong = [f"has peft_type {kind!r}: lora reads 'LORA' only"]
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if not wrong and (type(rank) is not int or rank < 1):
        wrong = [f"has r {rank!r}, which is no rank"]
    if not wrong and (type(alpha) not in (int, float) or not 0 < float(str(alpha)) < float("inf")):
        wrong = [f"has lora_alpha {alpha!r}, which is no number above 0"]
    if wrong:
        raise UsageError(f"adapter.load: {CONFIG} of {folder} {'; it '.join(wrong)}")
    return int(str(rank)), float(str(alpha))


def read_factors(folder: Path, model: nn.Layer, rank: int) -> dict[str, np.ndarray]:
    """Returns A and B of each layer that the folder adapts, by our names, 16-bit ones as float32.

    `model`: not placed, without an adapter. Raises UsageError for a tensor that belongs to no Linear layer of the
    model, for half a pair, and for another shape than the layer's and `rank`.
    """
    from paddle import nn

    linears = {
        name: layer.weight.shape for name, layer in model.named_sublayers() if isinstance(layer, nn.Linear)
    }
    file = folder / WEIGHTS
    if not file.is_file():
        raise UsageError(
            f"adapter.load: there is no {WEIGHTS} in {folder}: save it with safe_serialization=True."
        )
    try:
        source = SafetensorsFile(file)
        stripped, tables = renamed(source.names, {f"{_PREFIX}*": "*"}), names_of(model)
        conventions = [name for name in (HUGGING_FACE, INNER, PYTORCH) if name in tables.names]
        origins, there = max(
            (_present(tables, name, linears, stripped) for name in conventions), key=lambda pair: len(pair[0])
        )
        used = {name for origin in origins.values() for name in origin.names}
        if left := sorted(there.keys() - used):
            raise UsageError(
                f"adapter.load: {file} has {there[left[0]]}, which is A or B of no Linear layer of this model, or "
                f"lacks its counterpart ({len(left)} of {len(there)} tensors)."
            )
        weights = Translated(
            Translated(source, {new: Origin((Piece(old),)) for new, old in there.items()}), origins
        )
        values: dict[str, np.ndarray] = {}
        for name in origins:
            inputs, outputs = linears[name.rpartition(".")[0]]
            shape = (inputs, rank) if name.endswith(A) else (rank, outputs)
            if weights.shape(name) != shape:
                raise UsageError(
                    f"adapter.load: {name}, there {weights.called(name)}, is {list(weights.shape(name))} there and "
                    f"{list(shape)} here."
                )
            values[name] = widened(weights.read(name), weights.dtype(name))
    except CheckpointError as error:
        raise UsageError(f"adapter.load: {error}") from error
    return values


def _present(
    tables: Tables, convention: str, layers: Iterable[str], stripped: Mapping[str, str]
) -> tuple[dict[str, Origin], dict[str, str]]:
    """The origins of the layers that the file adapts, by one convention; and the file's names by this one's."""
    there = tables.current_names(convention, stripped)
    origins: dict[str, Origin] = {}
    for layer in layers:
        pair = factor_origins(tables, convention, [layer], "")
        if all(name in there for origin in pair.values() for name in origin.names):
            origins |= pair
    return origins, there


def peft_config(
    tables: Tables, origins: Mapping[str, Origin], rank: int, alpha: float, base: str | None, task: str | None
) -> dict[str, Any]:
    """The content of adapter_config.json for the adapted layers, whose `origins` have `_PREFIX`."""
    convention = HUGGING_FACE if HUGGING_FACE in tables.names else PYTORCH
    weights = {
        piece.name.removesuffix(".weight"): piece.transposed
        for spec in tables.names[convention].values()
        for piece in Origin.parse(spec).pieces
        if piece.name.endswith(".weight")
    }
    adapted = {
        name.removeprefix(_PREFIX).removesuffix(f".{A}.weight")
        for origin in origins.values()
        for name in origin.names
        if name.endswith(f".{A}.weight")
    }
    # PEFT adapts every module whose name ends with a target: the last word, if all such modules are adapted here.
    others = {name.rpartition(".")[2] for name in weights.keys() - adapted}
    targets = {word if (word := name.rpartition(".")[2]) not in others else name for name in adapted}
    return {
        "peft_type": "LORA", "task_type": task, "base_model_name_or_path": base, "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha, "target_modules": sorted(targets),
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": not all(weights[name] for name in adapted),
        "inference_mode": True, "init_lora_weights": True, "use_rslora": False, "use_dora": False,
        "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None,
    }  # fmt: skip


def peft_origins(tables: Tables, layers: Iterable[str]) -> dict[str, Origin]:
    """The origins of A and B of these layers under the names that PEFT reads. Raises UsageError for a model whose
    modules have other names in other versions of transformers: PEFT would pass over a name of another version."""
    for pattern, name in tables.versions.items():
        if pattern.rpartition(".")[0] != name.rpartition(".")[0]:
            raise UsageError(
                f"--adapter: modules of this model are called {pattern.removesuffix('.*')} or "
                f"{name.removesuffix('.*')}, by the version of transformers, and PEFT passes over the other one. Leave "
                "--adapter out, which merges the adapter."
            )
    convention = HUGGING_FACE if HUGGING_FACE in tables.names else PYTORCH
    return factor_origins(tables, convention, layers, _PREFIX)
