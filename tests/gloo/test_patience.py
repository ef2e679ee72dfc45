"""Exchanges wait for a late rank as long as we say, in C++ too, where Paddle has a fixed 30 s."""

from __future__ import annotations

import ctypes
import re
import time
from typing import Any

import pytest

from paddle_dp.gloo import time_limit
from paddle_dp.gloo.time_limit import CHAIN
from tests.ranks import run_ranks


def sum_with_one_late(patience: float, seconds: list[float], bridged: bool) -> list[Any]:
    """Sums of ones, to each of which the last rank comes so late; what came of it, and after how long."""
    from paddle_dp.errors import JobError
    from paddle_dp.gloo import install
    from paddle_dp.mesh import join, late_ranks

    watch = late_ranks.Arrivals
    watch.notice, watch.idle, watch.poll = 1.0, 0.4, 0.2
    mesh = join(patience=patience)
    if bridged:
        install(mesh.device)
    found: list[Any] = []
    for late in seconds:
        begin = time.monotonic()
        if mesh.rank == mesh.ranks - 1:
            time.sleep(late)
        try:
            said = mesh.sum([1.0])[0]
        except JobError as error:
            said = str(error)
        except (RuntimeError, ValueError) as error:
            said = type(error).__name__
        found.append([said, time.monotonic() - begin])
    return found


@pytest.mark.parametrize("bridged", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_limit_is_the_one_that_was_asked_for(bridged: bool) -> None:
    """With 1.5 s, a rank that is 0.5 s late is waited for, and one that is 4 s late is not, and named."""
    found = run_ranks(sum_with_one_late, 3, 1.5, [0.5, 4.0], bridged)
    for first, second in found[:2]:
        assert first[0] == 3.0
        assert 1.4 < second[1] < 3.8
        assert "for rank 2 in" in str(second[0])


def backward_with_one_late(seconds: float) -> list[float]:
    """DataParallel's gradient, whose exchange is C++ from end to end, with the last rank late to its backward."""
    import paddle

    from paddle_dp.mesh import join

    mesh = join()
    paddle.seed(0)
    model = paddle.DataParallel(paddle.nn.Linear(2, 1))
    loss = model(paddle.full([1, 2], 1.0 + mesh.rank)).sum()
    if mesh.rank == mesh.ranks - 1:
        time.sleep(seconds)
    loss.backward()
    gradient: list[float] = model.parameters()[0].grad.flatten().tolist()
    return gradient


@pytest.mark.long
def test_a_rank_35_s_late_to_its_backward_is_waited_for() -> None:
    assert run_ranks(backward_with_one_late, 2, 35.0, timeout=120) == [[1.5, 1.5]] * 2


def neighbours_and_limit(seconds: float) -> list[int]:
    """Joins where malloc puts the two gloo contexts of a group side by side; how many transports the 32 words from the
    first one on point at, and that context's limit and its transport's, in milliseconds."""
    from paddle.base import core

    from paddle_dp.mesh import join

    libc, create = ctypes.CDLL(None), core.ProcessGroupGloo.create
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]

    def create_side_by_side(*arguments: Any) -> Any:
        chunks = [libc.malloc(0x58) for _ in range(20000)]  # as large as a context; the last are side by side
        # As many as malloc keeps at hand: these are next, the lowest first.
        for chunk in reversed(chunks[-7:]):
            libc.free(chunk)
        return create(*arguments)

    core.ProcessGroupGloo.create = staticmethod(create_side_by_side)
    join(patience=seconds)
    gloo = time_limit._Gloo()
    (context,) = gloo._read_integers(gloo._registered("0") + CHAIN[0].offset, 0, 1, "")
    words = [gloo._read_integers(context, 8 * i, 1, "")[0] for i in range(32)]
    begins = [gloo._read(word, 8) for word in words]
    found = [
        word
        for word, begin in zip(words, begins, strict=True)
        if begin == gloo._vtable(CHAIN[2]).to_bytes(8, "little")
    ]
    return [len(set(found)), gloo.get_limit(context), *gloo._read_integers(found[0], CHAIN[2].offset, 1, "")]


def test_the_limit_is_set_wherever_malloc_puts_the_second_context_of_a_group() -> None:
    """Seen by chance as "gloo's time limit could not be found": a search took the neighbour's transport for its own."""
    assert run_ranks(neighbours_and_limit, 2, 7.0) == [[2, 7000, 7000]] * 2


class Objects(time_limit._Gloo):
    """Three objects as gloo's in this process's memory, with what is random there behind them."""

    def __init__(self, **changed: int) -> None:
        self.memory = [(ctypes.c_uint64 * 16)(*[7] * 16) for _ in CHAIN]
        starts = [ctypes.addressof(words) for words in self.memory]
        for place, (step, words, after) in enumerate(
            zip(CHAIN, self.memory, [*starts[1:], 30000], strict=True)
        ):
            words[0], words[1], words[step.offset // 8] = self._vtable(step), 1 + (4 << 32), after
            for at in range(step.offset // 8 + 1, 16):
                words[at] = after  # pointers at the same thing, and other words of 30 000
            for name, value in changed.items():
                if name.endswith(str(place)):
                    words[{"table": 0, "ranks": 1, "next": step.offset // 8}[name[:-1]]] = value
        self.limit = 30000

    def get_limit(self, context: int) -> int:  # type: ignore[override]
        return self.limit

    def set_limit(self, context: int, milliseconds: int) -> None:  # type: ignore[override]
        assert context == ctypes.addressof(self.memory[1])
        self.limit = milliseconds

    def _registered(self, key: str) -> int:
        return ctypes.addressof(self.memory[0])

    def _vtable(self, kind: time_limit._Class) -> int:
        return 1000 + CHAIN.index(kind)


def test_only_the_limit_and_its_copy_are_written() -> None:
    gloo = Objects()
    before = [list(words) for words in gloo.memory]
    gloo.set_time_limit("0", 5000)
    before[2][CHAIN[2].offset // 8] = 5000
    assert gloo.limit == 5000 and [list(words) for words in gloo.memory] == before


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"table0": 9}, "no phi::distributed::GlooCommContext"),
        ({"table1": 9}, "no gloo::rendezvous::Context"),
        ({"table2": 9}, "no gloo::transport::tcp::Context"),
        ({"next0": 8192 * 3 + 1}, "gloo::rendezvous::Context: nothing can be read at 0x6001"),
        ({"next1": 8}, "gloo::transport::tcp::Context: nothing can be read at 0x8"),
        ({"ranks1": 2 + (4 << 32)}, "of different groups"),
        ({"ranks2": 1 + (5 << 32)}, "of different groups"),
        ({"next2": 20000}, "gloo's limit is 30000 ms, its transport's 20000"),
    ],
)
def test_where_anything_is_otherwise_nothing_is_written_and_the_reason_is_told(
    changed: dict[str, int], reason: str
) -> None:
    gloo = Objects(**changed)
    before = [list(words) for words in gloo.memory]
    with pytest.raises(time_limit._UnknownLayoutError, match=re.escape(reason)):
        gloo.set_time_limit("0", 5000)
    assert gloo.limit == 30000 and [list(words) for words in gloo.memory] == before


def test_where_gloo_is_not_found_the_screen_says_why_once(capsys: pytest.CaptureFixture[str]) -> None:
    """This process has no group: the library's own table says so, and no address is followed."""
    time_limit._print_once.cache_clear()
    for _ in range(2):
        time_limit.set_time_limit(0, 5.0)
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "(Paddle has no groups yet)" in said
    assert time_limit._Gloo._read(8, 8) is None
    assert time_limit._Gloo._read((1 << 47) - 8, 8) is None
    assert time_limit._Gloo._read(12345678901, 8) is None
