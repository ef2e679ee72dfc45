"""Layers within a user's programs: the sublayers of a layer with a method of `paddle.jit.to_static`."""

from __future__ import annotations

from paddle import nn
from paddle.jit.dy2static.program_translator import StaticFunction


def has_program(layer: nn.Layer) -> bool:
    """Whether the layer's forward, or another method of it, is a program of `paddle.jit.to_static`."""
    tables = (vars(owner).values() for owner in (layer, *type(layer).__mro__))
    return any(isinstance(value, StaticFunction) for table in tables for value in table)


def layers_in_programs(model: nn.Layer) -> list[nn.Layer]:
    """The layers that a program may call. Their hooks run while it is traced, or are traced as a part of it."""
    programs = [layer for layer in model.sublayers(include_self=True) if has_program(layer)]
    return list({id(layer): layer for program in programs for layer in program.sublayers()}.values())
