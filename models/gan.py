"""A generator and a discriminator of vectors, trained in turns: a GAN (Goodfellow et al., arXiv:1406.2661)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import paddle
import paddle.nn.functional as F
from paddle import nn

from models._checks import at_least_one, check_widths
from models.mlp import gelu_layers


class Gan(nn.Layer):
    """Makes vectors [n, outputs] in 0..1 of noise [n, noise]; a discriminator learns to tell them from real ones.

    `discriminator_loss` and `generator_loss` are the losses of a recipe's turns with these names: one number for each
    sample. The generator maximizes log D(G(noise)), the loss without saturation.
    """

    def __init__(self, noise: int, hidden: Sequence[int], outputs: int):
        super().__init__()
        self.generator = nn.Sequential(*gelu_layers([noise, *hidden, outputs])[:-1], nn.Sigmoid())
        self.discriminator = nn.Sequential(*gelu_layers([outputs, *reversed(hidden), 1])[:-1])

    def forward(self, noise: paddle.Tensor) -> paddle.Tensor:
        return self.generator(noise)

    def discriminator_loss(self, generated: paddle.Tensor, real: paddle.Tensor) -> paddle.Tensor:
        """-log D(real) - log(1 - D(generated)), [n]."""
        return F.softplus(-self._score(real)) + F.softplus(self._score(generated.detach()))

    def generator_loss(self, generated: paddle.Tensor, real: paddle.Tensor) -> paddle.Tensor:
        """-log D(generated), [n]."""
        return F.softplus(-self._score(generated))

    def _score(self, samples: paddle.Tensor) -> paddle.Tensor:
        return self.discriminator(samples).squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class Config:
    noise: int = 16
    """Random numbers from which the generator makes a sample."""

    hidden: tuple[int, ...] = (128, 128)
    """Widths of the generator's hidden layers; the discriminator has them in reverse order."""

    outputs: int = 64
    """Numbers in a sample."""

    def __post_init__(self) -> None:
        at_least_one(self, "noise", "outputs")
        check_widths(self, "hidden")

    def build(self) -> nn.Layer:
        return Gan(self.noise, self.hidden, self.outputs)
