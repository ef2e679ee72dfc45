"""Builds models without memory for weights, to inspect their layers and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lazily() -> Iterator[None]:
    """A context in which models are built without memory for weights. Unique names, random generators and the device
    are restored.

    A model that computes with its weights while it is built (spectral_norm, an LSTM in Paddle 3.3.1) raises Paddle's
    error.
    """
    import paddle

    generator_states, device = paddle.get_rng_state(), paddle.get_device()
    try:
        paddle.set_device("cpu")
        with paddle.LazyGuard(), paddle.utils.unique_name.guard():
            yield
    finally:
        paddle.set_device(device)
        paddle.set_rng_state(generator_states)
