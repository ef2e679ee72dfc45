"""Contrastive loss: each sample's embedding must be nearer to its class than to all other samples of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddle_dp.losses._base import full_precision
from paddle_dp.losses._pairs import Across, ComparesSamples, embeddings, itself
from paddle_dp.units import AboveZero

if TYPE_CHECKING:
    import paddle

_FAR = -1e9  # the logit of a sample that does not compete


class Contrastive(ComparesSamples):
    """Sum over anchors of the mean over its positives p of -log softmax(cosines / temperature) at p.

    Outputs [n, d] with class numbers as targets [n]: positives are the other samples of the class, and all other
    samples compete (Khosla et al., arXiv:2004.11362, eq. 2); an anchor without a positive does not count. Outputs of
    two such tensors, one per tower: the positive is the same sample in the other tower, all samples there compete, in
    both directions, and targets are not read (Radford et al., arXiv:2103.00020, figure 3).
    """

    def __init__(self, across: Across, temperature: float):
        super().__init__(across)
        self.temperature = temperature

    @full_precision
    def __call__(self, outputs: Any, targets: Any) -> tuple[paddle.Tensor, Any]:
        """(total, the number of anchors that count); the total is float32 even under autocast."""
        import paddle

        total: Any = 0.0
        counted: Any = 0.0
        directions = self._compared(outputs, targets)
        for logits, positive in directions:
            competing = paddle.logsumexp(logits, axis=-1)
            positives = positive.sum(-1)
            mean = (logits * positive).sum(-1) / positives.clip(min=1.0)
            counts = (positives > 0).astype(logits.dtype)
            total = total + ((competing - mean) * counts).sum() / len(directions)
            counted = counted + counts.sum() / len(directions)
        return total, counted

    @full_precision
    def scores(self, outputs: Any, targets: Any) -> dict[str, paddle.Tensor]:
        """`recall1`: the number of counting anchors with a positive as the nearest sample."""
        recall: Any = 0.0
        directions = self._compared(outputs, targets)
        for logits, positive in directions:
            best = positive.take_along_axis(logits.argmax(-1, keepdim=True), -1, broadcast=False)
            recall = recall + best.sum() / len(directions)
        return {"recall1": recall}

    def _compared(self, outputs: Any, targets: Any) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
        """One pair per direction: logits [n, N]; 1.0 where the sample is a positive, else 0.0."""
        import paddle

        if isinstance(outputs, tuple | list) and len(outputs) == 2:
            towers = [embeddings(tower, "contrastive", True) for tower in outputs]
            gathered, first = self.samples.gather(*towers)
            same = itself(len(towers[0]), len(gathered[0]), first).astype(towers[0].dtype)
            pairs = ((towers[0], gathered[1]), (towers[1], gathered[0]))
            return [(tower.matmul(all_, transpose_y=True) / self.temperature, same) for tower, all_ in pairs]
        anchors, candidates, same, diagonal = self.compared(outputs, targets, "contrastive", True)
        logits = anchors.matmul(candidates, transpose_y=True) / self.temperature
        logits = paddle.where(diagonal, paddle.full_like(logits, _FAR), logits)
        positive = same.logical_and(diagonal.logical_not())
        return [(logits, positive.astype(logits.dtype))]


@dataclass(frozen=True, kw_only=True)
class Config:
    across: Across = "ranks"
    """The samples to compare with: `ranks`, the global micro-batch, as in one process; `rank`, each rank's samples,
    which is another loss on another number of ranks."""

    temperature: AboveZero = 0.1
    """Divisor of the cosines: the smaller it is, the more the nearest samples count."""

    def build(self) -> Contrastive:
        return Contrastive(self.across, self.temperature)
