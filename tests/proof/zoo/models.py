"""Models of the zoo that nobody prepared for any layout: plain Paddle, as a user would write them."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.vision import models as vision


class Centred(nn.Layer):
    """A perceptron that takes a running centre of its hidden layer away, which it updates in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.register_buffer("centre", paddle.zeros([32]))

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        hidden = F.gelu(self.body(samples))
        if self.training:
            with paddle.no_grad():
                self.centre.set_value(0.9 * self.centre + 0.1 * hidden.detach().mean(0))
        return self.head(hidden - self.centre)


class Shifted(nn.Layer):
    """A perceptron with a constant buffer that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.register_buffer("shift", paddle.full([32], 0.5))

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        return self.head(F.gelu(self.body(samples)) + self.shift)


class Encoder(nn.Layer):
    """nn.TransformerEncoder as it comes, over tokens [n, t]; its key biases have no true gradient."""

    def __init__(self, vocab: int = 32, width: int = 32, depth: int = 2, dropout: float = 0.1):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = self.create_parameter([8, width])
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=dropout)
        self.encoder = nn.TransformerEncoder(layer, depth)
        self.out = nn.Linear(width, vocab)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.out(self.encoder(self.token(tokens) + self.position))


class Recurrent(nn.Layer):
    """Two layers of `kind` (LSTM, GRU, SimpleRNN) over tokens [n, t], with dropout between them."""

    def __init__(self, kind: str = "LSTM", dropout: float = 0.0, vocab: int = 32, width: int = 24):
        super().__init__()
        self.token = nn.Embedding(vocab, width, padding_idx=0)
        self.recurrent = getattr(nn, kind)(width, width, num_layers=2, dropout=dropout)
        self.out = nn.Linear(width, vocab)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.out(self.recurrent(self.token(tokens))[0])


class Frozen(nn.Layer):
    """A large frozen layer before a small one that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 256), nn.Linear(256, 10)
        for parameter in self.body.parameters():
            parameter.stop_gradient = True

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        return self.head(F.gelu(self.body(samples)))


class ThreeTimes(nn.Layer):
    """One matrix, used three times, with gates that begin at zero (ReZero)."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.shared, self.head = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.gates = self.create_parameter([3], default_initializer=nn.initializer.Constant(0.0))

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        x = self.into(samples)
        for gate in self.gates:
            x = x + gate * F.gelu(self.shared(x))
        return self.head(x)


class Tied(nn.Layer):
    """An embedding that is used three times: for tokens, for positions, and for the scores."""

    def __init__(self, vocab: int = 32, width: int = 16):
        super().__init__()
        self.token, self.hidden = nn.Embedding(vocab, width), nn.Linear(width, width)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.token(tokens) + self.token.weight[: tokens.shape[1]]
        return F.gelu(self.hidden(x)) @ self.token.weight.t()


class Normed(nn.Layer):
    """Convolutions under `norm`: spectral, weight, group, layer, instance, none with a bias, or batch behind a bias."""

    def __init__(self, norm: str = "group", width: int = 8):
        super().__init__()
        first, second = nn.Conv2D(1, width, 3, padding=1), nn.Conv2D(width, width, 3, padding=1)
        if norm in ("spectral", "weight"):
            wrap = nn.utils.spectral_norm if norm == "spectral" else nn.utils.weight_norm
            first, second = wrap(first), wrap(second)
        norms: dict[str, Any] = {
            "group": lambda: nn.GroupNorm(2, width),
            "layer": lambda: nn.LayerNorm([width, 8, 8], weight_attr=False, bias_attr=False),
            "instance": lambda: nn.InstanceNorm2D(width),
            "batch": lambda: nn.BatchNorm2D(width),
            "legacy": lambda: nn.BatchNorm(width, act="relu"),
        }
        made = norms.get(norm, nn.Identity)
        self.body = nn.Sequential(first, made(), nn.GELU(), second, made(), nn.GELU())
        self.head = nn.Linear(width, 10)

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.body(images).mean([2, 3]))


class Dead(nn.Layer):
    """ReLU units, many of which never fire, and a PReLU; some rows get no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.bend = nn.PReLU(64)
        with paddle.no_grad():
            self.body.bias.set_value(paddle.where(paddle.arange(64) % 2 == 0, -9.0, 0.1))

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.bend(F.relu(self.body(samples)) - 0.01))


class Experts(nn.Layer):
    """Two experts and a router of every sample to the better one: what an expert learns from changes in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 2)
        self.experts = nn.LayerList([nn.Linear(64, 10), nn.Linear(64, 10)])

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        gates = F.softmax(self.router(samples))
        kept = F.one_hot(gates.argmax(-1), 2) * gates
        return sum(kept[:, k : k + 1] * expert(samples) for k, expert in enumerate(self.experts))


class LogitScale(nn.Layer):
    """A linear layer under CLIP's logit scale, a parameter of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 10)
        self.scale = self.create_parameter([], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        return self.scale.exp() * self.body(samples)


class Logged(nn.Layer):
    """A perceptron that notes a mean of its samples, which nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.calls, self.mean = 0, 0.0

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        hidden = F.gelu(self.body(samples))
        self.calls += 1
        self.mean = float(hidden.mean())
        return self.head(hidden)


class Scaled(nn.Layer):
    """A block whose forward writes the buffer that scales its outputs, so that backward reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", paddle.ones([16]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        with paddle.no_grad():
            self.scale.set_value(0.8 * self.scale + self.linear.weight.abs().mean(0))
        return x + paddle.tanh(self.linear(x)) * self.scale


class Scaling(nn.Layer):
    """Scores from tokens; a moving scale in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList([nn.Embedding(32, 16), *(Scaled() for _ in range(4)), nn.Linear(16, 32)])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class DropPath(nn.Layer):
    """Stochastic depth by `paddle.rand`, as PaddleClas's models have it, at a rate that grows from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.inner, self.head = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.calls = 0

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        hidden = F.gelu(self.body(samples))
        branch = self.inner(hidden)
        if self.training:
            keep = max(1 - 0.1 * self.calls, 0.5)
            self.calls += 1
            branch = branch * paddle.floor(keep + paddle.rand([paddle.shape(branch)[0], 1])) / keep
        return self.head(hidden + branch)


class Vision(nn.Layer):
    """A model of paddle.vision by its name, for small images and few classes."""

    def __init__(self, name: str, classes: int = 10):
        super().__init__()
        self.model = getattr(vision, name)(num_classes=classes)

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        found = self.model(images)
        # Googlenet has three heads.
        return sum(found[1:], found[0]) if isinstance(found, tuple | list) else found
