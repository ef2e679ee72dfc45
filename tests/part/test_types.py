"""A type as a person would say it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from annotated_types import Gt

from paddle_dp.part.config import describe_type
from paddle_dp.units import Bytes, Every, Positive, Probability


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (int, "whole number"),
        (str | None, "text or null"),
        (Positive, "whole number, 1 or more"),
        (Probability, "number, 0 or more, less than 1"),
        (Annotated[float, Gt(0)] | None, "number, more than 0 or null"),
        (Literal["sum", "mean"], "one of sum, mean"),
        (Bytes, "quantity such as 25 MB"),
        (Every | None, "quantity such as 50 steps or null"),
        (tuple[int, ...], "list: whole number"),
        (tuple[int, str], "list: whole number; text"),
        (dict[str, float], "mapping: text to number"),
        (Any, "anything"),
        (bytes, "bytes"),
    ],
)
def test_in_words(kind: Any, said: str) -> None:
    assert describe_type(kind) == said
