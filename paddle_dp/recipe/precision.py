"""The setting `train.precision`: the floating-point formats of a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, WithJsonSchema

from paddle_dp.part import ErrorContext, read_settings
from paddle_dp.part.config import adapter
from paddle_dp.units import AboveZero

Dtype = Literal["float32", "float64", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The number formats of a training. float64 applies to everything, with the same initial weights (for proofs; slow
    on a GPU). `level` is O1 (autocast) or O2 (low-precision weights with float32 masters). In a recipe the dtype alone
    is enough: `precision: bfloat16`."""

    dtype: Dtype = "float32"
    """The number format of products and convolutions; of everything if `float64`."""

    level: Literal["O1", "O2"] = "O1"
    """`O1` computes in it where that is safe; `O2` also keeps weights in it."""

    scale: AboveZero = 65536.0
    """The initial loss scale, for float16 only; it then adapts."""

    @property
    def is_low(self) -> bool:
        """True for a dtype of 16 bits, which accelerators compute in and CPUs emulate in float32."""
        return self.dtype in ("bfloat16", "float16")


_OWNER = ErrorContext(subject="train.precision", prefix="train.precision")


def read_precision(value: Any) -> Precision:
    """Reads a recipe's value, a dtype or a mapping. Raises RecipeError for anything else."""
    if isinstance(value, Precision):
        return value
    return read_settings(Precision, value if isinstance(value, dict) else {"dtype": value}, _OWNER)


def _written(precision: Precision) -> str | dict[str, Any]:
    """The dtype alone if the other settings are defaults; else a mapping."""
    return precision.dtype if precision == Precision(dtype=precision.dtype) else vars(precision)


_EDITOR = {"anyOf": [TypeAdapter(Dtype).json_schema(), adapter(Precision).json_schema()]}
PrecisionSetting = Annotated[
    Precision, PlainValidator(read_precision), PlainSerializer(_written), WithJsonSchema(_EDITOR)
]
