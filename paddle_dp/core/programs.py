"""Layers within a user's programs (`paddle.jit.to_static`)."""

from __future__ import annotations

from paddle import nn
from paddle.jit.dy2static.program_translator import StaticFunction


def has_program(layer: nn.Layer) -> bool:
    """Whether the layer's forward, or another method of it, is a program."""
    tables = (vars(owner).values() for owner in (layer, *type(layer).__mro__))
    return any(isinstance(value, StaticFunction) for table in tables for value in table)


def layers_in_programs(model: nn.Layer) -> list[nn.Layer]:
    """The layers below one whose forward is a program. Another method may be for deployment alone."""
    layers = model.sublayers(include_self=True)
    programs = [layer for layer in layers if isinstance(layer.forward, StaticFunction)]
    return list({id(layer): layer for program in programs for layer in program.sublayers()}.values())
