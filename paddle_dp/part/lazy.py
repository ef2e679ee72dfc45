"""A model built without memory for its weights: to be looked at, never to compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lazily() -> Iterator[None]:
    """Inside, models are built without memory for their weights; names, random numbers and device stay as they were.

    A model that computes with its weights while it is built (spectral_norm, an LSTM in Paddle 3.3.1) raises whatever
    Paddle raises then.
    """
    import paddle

    kept, device = paddle.get_rng_state(), paddle.get_device()
    try:
        paddle.set_device("cpu")
        with paddle.LazyGuard(), paddle.utils.unique_name.guard():
            yield
    finally:
        paddle.set_device(device)
        paddle.set_rng_state(kept)
