"""Types in words, for help: «number, 0 or more», «whole number or null», «one of sum, mean»."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from paddle_dp.units import Quantity

_PLAIN: dict[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
    Any: "anything",
}
_BOUNDS: dict[type, str] = {
    Ge: "{0.ge} or more",
    Gt: "more than {0.gt}",
    Le: "{0.le} or less",
    Lt: "less than {0.lt}",
}


def in_words(annotation: Any) -> str:
    """The values that a setting of this type takes, in words."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Quantity):
        return f"quantity such as {annotation.example}"
    if isinstance(annotation, type) and is_dataclass(annotation):
        return f"mapping of {', '.join(field.name for field in fields(annotation))}"
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [_BOUNDS[type(b)].format(b) for b in annotation.__metadata__ if type(b) in _BOUNDS]
        return ", ".join([in_words(inner[0]), *bounds])
    if origin in (Union, UnionType):
        return " or ".join(map(in_words, inner))
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (list, tuple):
        return "list: " + "; ".join(in_words(each) for each in inner if each is not Ellipsis)
    if origin is dict:
        return f"mapping: {in_words(inner[0])} to {in_words(inner[1])}"
    return getattr(annotation, "__name__", str(annotation))
