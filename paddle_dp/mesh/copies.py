"""Asynchronous copies from the host's memory to the device's.

`paddle.to_tensor(array, place=device)` returns after the copy and all work queued before it (3.3.1: two waits for each
tensor). Here a copy is only queued; operations that read the tensor are queued after it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from paddle_dp.tensors import on_host

if TYPE_CHECKING:
    import numpy as np
    import paddle

    Array = np.ndarray[Any, Any]

T = TypeVar("T")
# Recorded events, each with memory that must not be reused until the device has reached the event. They are recorded
# again after that, because a custom device waits when an event is destroyed (3.3.1).
_recorded: deque[tuple[paddle.device.Event, Any]] = deque()


def copies_to(device: Any) -> Callable[[Array], paddle.Tensor]:
    """Returns `to_device` for this place, which is examined only once."""
    return on_host if is_cpu(device) else partial(to_device, device=device)


def to_device(array: Array, device: Any) -> paddle.Tensor:
    """Copies `array` to a tensor at `device`, on the current stream; the array may be changed on return.

    A GPU copies from page-locked memory, other devices from ordinary memory; either is kept until the copy is done.
    """
    import paddle

    if is_cpu(device):
        return on_host(array)
    if not has_streams(str(device)):
        return paddle.to_tensor(array, place=device)
    pinned = "gpu" in str(device)
    source = paddle.to_tensor(array, place=paddle.CUDAPinnedPlace()) if pinned else on_host(array)
    copy = source.to(device, blocking=False)
    _recorded.append((_record(), source))
    return copy


def is_cpu(device: Any) -> bool:
    """True for the CPU, in any of Paddle's classes of places."""
    return str(device) == "Place(cpu)"


def prefetch(items: Iterator[T], device: Any) -> Iterator[T]:
    """Yields `items`, with tensors copied by `to_device`, each while the device computes with the previous item.

    It takes an item, and queues its copies on a separate stream, before it yields the previous one. An error while
    taking an item is raised in that item's turn. On a CPU, or without streams, it returns `items` unchanged.
    """
    return _prefetch(items) if not is_cpu(device) and has_streams(str(device)) else items


@cache
def has_streams(device: str) -> bool:
    """True if Paddle has streams and events for the current device, called `device`; prints a line once if not."""
    import paddle

    try:
        paddle.device.Stream().wait_event(_record())
    except Exception as error:  # noqa: BLE001 - builds of Paddle and plugins raise different errors
        print(
            f"Paddle has no streams and events for {device} here, so it waits while a batch is copied "
            f"({type(error).__name__}: {error})",
            file=sys.stderr,
        )
        return False
    return True


def _prefetch(items: Iterator[T]) -> Iterator[T]:
    import paddle

    copying = paddle.device.Stream()
    arrivals: list[paddle.device.Event] = []  # of copies for which the computing stream does not wait yet

    def take() -> list[T]:
        # Queued work may still use memory that is free; later work does not.
        copying.wait_event(now := _record())
        _recorded.append((now, None))
        with paddle.device.stream_guard(copying):
            try:
                return list(islice(items, 1))
            finally:
                arrivals.append(_record())

    def await_copies() -> None:
        while arrivals:
            paddle.device.current_stream().wait_event(arrival := arrivals.pop())
            _recorded.append((arrival, None))

    try:
        current, error = take(), None
        while current:
            await_copies()
            upcoming: list[T] = []
            try:
                upcoming = take()
            except Exception as raised:  # noqa: BLE001 - any error is raised in its item's turn
                error = raised
            yield current[0]
            if error is not None:
                raise error
            current = upcoming
    finally:
        await_copies()  # also unused copies, as their memory will be reused


def _record() -> paddle.device.Event:
    """Records an event after all queued work of the current stream."""
    import paddle

    done = bool(_recorded) and _recorded[0][0].query()
    event = _recorded.popleft()[0] if done else paddle.device.Event()
    event.record()
    return event
