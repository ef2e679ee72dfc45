"""Distillation: a student learns class numbers, and the scores of a teacher (Hinton et al., arXiv:1503.02531)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from paddle_dp.errors import LossError
from paddle_dp.losses._base import full_precision
from paddle_dp.losses.cross_entropy import CrossEntropy
from paddle_dp.units import AboveZero, Fraction, Probability

if TYPE_CHECKING:
    import paddle


class DistillationLoss:
    """Total over samples of (1 - weight) × CE(student, class) + weight × T² × KL(teacher ‖ student), the scores of both
    divided by the temperature T in the second.

    Outputs are the student's and the teacher's scores, [n, c] or [n, t, c] each, or the student's alone, as in an
    evaluation: then the loss is the cross-entropy. Targets are class numbers [n] or [n, t]; a sample's t are averaged.
    """

    counts_samples = True

    def __init__(self, temperature: float, weight: float, label_smoothing: float):
        self.temperature, self.weight = temperature, weight
        self.hard = CrossEntropy(label_smoothing)

    @full_precision
    def __call__(self, outputs: Any, targets: Any) -> tuple[paddle.Tensor, Any]:
        """(total, count); the total is float32 even under autocast."""
        import paddle.nn.functional as F

        student, teacher = _both(outputs)
        total, count = self.hard(student, targets)
        if teacher is None:
            return total, count
        if student.shape != teacher.shape:
            raise LossError(
                f"distillation: the student gives {student.shape} scores, the teacher {teacher.shape}."
            )
        log_student = F.log_softmax(student.astype(total.dtype) / self.temperature)
        log_teacher = F.log_softmax(teacher.detach().astype(total.dtype) / self.temperature)
        targets_each = max(1, prod(student.shape[1:-1]))
        divergence = (log_teacher.exp() * (log_teacher - log_student)).sum() / targets_each
        return (1 - self.weight) * total + self.weight * self.temperature**2 * divergence, count

    def scores(self, outputs: Any, targets: Any) -> dict[str, paddle.Tensor]:
        """The student's acc1 and acc5, and, with a teacher, its accuracy, `teacher_acc1`."""
        student, teacher = _both(outputs)
        scores = self.hard.scores(student, targets)
        if teacher is not None:
            scores["teacher_acc1"] = self.hard.scores(teacher, targets)["acc1"]
        return scores

    def num_classes(self, outputs: Any) -> int:
        return self.hard.num_classes(_both(outputs)[0])

    def predictions(self, outputs: Any) -> paddle.Tensor:
        return self.hard.predictions(_both(outputs)[0])


def _both(outputs: Any) -> tuple[paddle.Tensor, paddle.Tensor | None]:
    """The student's and the teacher's scores. Raises LossError for other outputs."""
    if not isinstance(outputs, tuple | list):
        return outputs, None
    if len(outputs) != 2:
        raise LossError(
            f"distillation takes the scores of student and teacher, and the model returns {len(outputs)} outputs."
        )
    return outputs[0], outputs[1]


@dataclass(frozen=True, kw_only=True)
class Config:
    temperature: AboveZero = 2.0
    """Both scores are divided by it before they are compared: a higher one shows more of the unlikely classes."""

    weight: Fraction = 0.5
    """Share of the teacher's scores in the loss; the rest is the cross-entropy against the classes."""

    label_smoothing: Probability = 0.0
    """Share of each class target that is spread evenly over all classes."""

    def build(self) -> DistillationLoss:
        return DistillationLoss(self.temperature, self.weight, self.label_smoothing)
