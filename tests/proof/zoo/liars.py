"""Models that one process and N ranks cannot train alike, and that a proof must not call the same.

Later randomness, memory of samples, and state in plain Python: each begins harmlessly, or with an effect that another
order of samples, taken for rounding, would excuse.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn


class Liar(nn.Layer):
    """A perceptron, in whose middle `change` lies."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.calls = 0
        self.prepare(width)

    def prepare(self, width: int) -> None:
        """Makes what it needs."""

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        hidden = F.gelu(self.body(samples))
        if self.training:
            self.calls += 1
            hidden = self.change(hidden)
        return self.head(hidden)

    def change(self, hidden: paddle.Tensor) -> paddle.Tensor:
        raise NotImplementedError


class UnitDropRamp(Liar):
    """Dropout by paddle.rand at a rate that grows from 0: draws begin with the second forward."""

    def change(self, hidden):
        rate = min(0.02 * (self.calls - 1), 0.5)
        kept = (paddle.rand(hidden.shape) >= rate).astype(hidden.dtype)
        return hidden + hidden.tanh() * kept / (1 - rate) if rate else hidden + hidden.tanh()


class NoiseAfterWarmup(Liar):
    """Noise that a counter of steps switches on."""

    def change(self, hidden):
        noisy = self.calls > 4
        return hidden + 0.05 * paddle.randn(hidden.shape).astype(hidden.dtype) if noisy else hidden


class NumpyDropout(Liar):
    """Dropout by NumPy's generator, from the third forward on."""

    def change(self, hidden):
        if self.calls <= 2:
            return hidden
        return hidden * paddle.to_tensor(np.random.random(hidden.shape) > 0.1).astype(hidden.dtype)


class OwnGenerator(Liar):
    """Numbers of a generator that the layer made for itself."""

    def prepare(self, width):
        self.random = np.random.default_rng(5)  # no watch of Paddle's, NumPy's and Python's sees it

    def change(self, hidden):
        if self.calls <= 3:
            return hidden
        return hidden * paddle.to_tensor(1 + 0.05 * self.random.normal(size=hidden.shape)).astype(
            hidden.dtype
        )


class RandomLayerScale(Liar):
    """A scale for each sample by Python's generator."""

    def change(self, hidden):
        if self.calls <= 3:
            return hidden
        scales = [1 + 0.1 * random.random() for _ in range(hidden.shape[0])]
        return hidden * paddle.to_tensor(scales).astype(hidden.dtype).unsqueeze(1)


class LastSample(Liar):
    """A cache of the last sample's features, which the next forward reads."""

    def prepare(self, width):
        self.register_buffer("last", paddle.zeros([width]))

    def change(self, hidden):
        mixed = hidden + 0.2 * self.last.astype(hidden.dtype)
        self.last.set_value(hidden[-1].detach().astype(self.last.dtype))
        return mixed


class Queue(Liar):
    """A queue of features, as MoCo's, shorter than a batch."""

    def prepare(self, width):
        self.register_buffer("queue", paddle.zeros([8, width]))

    def change(self, hidden):
        moved = hidden - 0.3 * self.queue.mean(0).astype(hidden.dtype)
        self.queue.set_value(paddle.concat([self.queue[4:], hidden[-4:].detach().astype(self.queue.dtype)]))
        return moved


class Prototype(Liar):
    """A prototype that moves to the sample with the largest norm."""

    def prepare(self, width):
        self.register_buffer("prototype", paddle.zeros([width]))

    def change(self, hidden):
        moved = hidden + 0.1 * self.prototype.astype(hidden.dtype)
        farthest = hidden[int(hidden.square().sum(1).argmax())].detach()
        self.prototype.set_value(0.5 * self.prototype + 0.5 * farthest.astype(self.prototype.dtype))
        return moved


class PowerVector(Liar):
    """A vector as spectral norm's, iterated with the samples."""

    def prepare(self, width):
        self.register_buffer("u", paddle.ones([width]) / width**0.5)

    def change(self, hidden):
        u = self.u.astype(hidden.dtype)
        moved = F.normalize((hidden.detach().t() @ (hidden.detach() @ u)), axis=0)
        self.u.set_value(moved.astype(self.u.dtype))
        return hidden / (1 + (hidden @ u).square().mean().detach().sqrt() * 0.1)


class MeanInFloat(Liar):
    """A moving mean in a Python number."""

    def prepare(self, width):
        self.mean = 0.0

    def change(self, hidden):
        moved = hidden - 0.5 * self.mean
        self.mean = 0.9 * self.mean + 0.1 * float(hidden.mean())
        return moved


class PastMeans(Liar):
    """A list of past means."""

    def prepare(self, width):
        self.past: list[np.ndarray] = []

    def change(self, hidden):
        moved = (
            hidden - 0.2 * paddle.to_tensor(np.mean(self.past, 0)).astype(hidden.dtype)
            if self.past
            else hidden
        )
        self.past = [*self.past[-3:], hidden.detach().mean(0).numpy()]
        return moved


class RecentMeans(Liar):
    """A deque of the last three means."""

    def prepare(self, width):
        self.recent = deque([np.zeros(width)], maxlen=3)

    def change(self, hidden):
        moved = hidden - 0.2 * paddle.to_tensor(self.recent[0]).astype(hidden.dtype)
        self.recent.append(hidden.detach().mean(0).numpy())
        return moved


class ClassMeans(Liar):
    """A dict of the means of classes."""

    def prepare(self, width):
        self.means: dict[int, np.ndarray] = {}

    def change(self, hidden):
        classes = hidden[:, :4].argmax(1).numpy()
        known = [self.means.get(int(c), np.zeros(hidden.shape[1])) for c in classes]
        for c in set(classes.tolist()):
            self.means[c] = hidden.detach().numpy()[classes == c].mean(0)
        return hidden - 0.1 * paddle.to_tensor(np.stack(known)).astype(hidden.dtype)


class Features(Liar):
    """The features used last, by a digest of the sample."""

    def prepare(self, width):
        self.cache: OrderedDict[int, Any] = OrderedDict()

    def change(self, hidden):
        for row in hidden.detach().numpy()[:3]:
            self.cache[hash(row.tobytes())] = row
        while len(self.cache) > 8:
            self.cache.popitem(last=False)
        oldest = next(iter(self.cache.values()))
        return hidden + 0.1 * paddle.to_tensor(oldest).astype(hidden.dtype)


_SEEN: deque[np.ndarray] = deque(maxlen=3)


class ModuleGlobal(Liar):
    """A memory in a global variable of the model's module."""

    def change(self, hidden):
        past = np.mean(_SEEN, 0) if _SEEN else np.zeros(hidden.shape[1])
        _SEEN.append(hidden.detach().numpy()[0])
        return hidden + 0.1 * paddle.to_tensor(past).astype(hidden.dtype)


class LateCache(Liar):
    """A cache that is read from the fourth forward on, with a weight of 0.003."""

    def prepare(self, width):
        self.first = np.zeros(width)

    def change(self, hidden):
        weight = 0.003 if self.calls > 3 else 0.0
        moved = hidden + weight * paddle.to_tensor(self.first).astype(hidden.dtype)
        self.first = hidden.detach().numpy()[0]
        return moved
