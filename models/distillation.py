"""A small network that learns from a large one: student and teacher, both multilayer perceptrons (arXiv:1503.02531)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn

from models._checks import at_least_one, check_widths
from models.mlp import MLP


class Distillation(nn.Layer):
    """In training, the scores [n, classes] of student and teacher; in evaluation the student's alone.

    The teacher gets no gradient, and computes as in evaluation. Its weights are loaded, under `teacher.`.
    """

    def __init__(self, student: nn.Layer, teacher: nn.Layer):
        super().__init__()
        self.student, self.teacher = student, teacher
        for parameter in self.teacher.parameters():
            parameter.stop_gradient = True

    def forward(self, samples: paddle.Tensor) -> Any:
        scores = self.student(samples)
        if not self.training:
            return scores
        self.teacher.eval()
        return scores, self.teacher(samples)


@dataclass(frozen=True, kw_only=True)
class Config:
    inputs: int = 64
    """Numbers in a sample."""

    student: tuple[int, ...] = (32,)
    """Widths of the student's hidden layers."""

    teacher: tuple[int, ...] = (256, 256)
    """Widths of the teacher's hidden layers."""

    classes: int = 10
    """Number of classes."""

    activation: str = "gelu"
    """Activation of both: `relu`, `gelu`, `silu` or `tanh`."""

    def __post_init__(self) -> None:
        at_least_one(self, "inputs", "classes")
        check_widths(self, "student")
        check_widths(self, "teacher")

    def build(self) -> nn.Layer:
        student, teacher = (
            MLP(self.inputs, hidden, self.classes, self.activation, 0.0)
            for hidden in (self.student, self.teacher)
        )
        return Distillation(student, teacher)
