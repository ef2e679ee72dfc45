"""Paddle's own gloo collectives, kept aside before they are replaced; the bridge calls them wherever they are right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.base import core
from paddle.distributed import collective

from paddle_dp.errors import UsageError
from paddle_dp.mesh import rolls

KEPT = (
    "create",
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "broadcast",
    "scatter",
    "scatter_tensor",
    "gather",
)
# Of another type, gloo ends the process with exit(-1) and not a word (GENERATE_FUNC in process_group_gloo.cc).
CARRIED = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8", "bool")
_own: dict[str, Any] = {}

# What wants to know of exchanges: asked for a context around each one, with the group (its `id`, `rank` and `ranks`)
# along which it goes. An exchange within an exchange is told, too.
Observer = Callable[[Any], AbstractContextManager[Any]]
observers: list[Observer] = []


@dataclass(frozen=True)
class Known:
    """A process group that the bridge made: its number among the job's messages, this rank in it, the global ranks."""

    process_group: Any  # held on to: ids of objects are used again
    id: int
    rank: int
    ranks: list[int]


_known: dict[int, Known] = {}


class Done:
    """A task that was finished when it was handed out: gloo's collectives return when they are through."""

    def wait(self, *_: Any) -> bool:
        return True

    is_completed = synchronize = wait


def keep() -> None:
    """Remembers the library's functions. Only the first call counts: later ones would remember ours."""
    if not _own:
        _own.update({name: getattr(core.ProcessGroupGloo, name) for name in KEPT})
        _own.update({name: _on_the_roll(name, _own[name]) for name in KEPT[1:]})


def _on_the_roll(name: str, original: Any) -> Any:
    """A collective that observers hear of, and that this rank is known to have come to, or not: whoever waits can say
    for whom."""
    seen: dict[int, tuple[Any, str, list[int]]] = {}

    @functools.wraps(original)
    def ours(process_group: Any, *args: Any) -> Any:
        roll = rolls.here()
        if roll is None:
            return original(process_group, *args)
        if id(process_group) not in seen:
            group = group_of(process_group)
            seen[id(process_group)] = process_group, f"group {group.id}", list(group.ranks)
        _, group_name, members = seen[id(process_group)]
        with roll.waiting(group_name, members, name):
            return original(process_group, *args)

    return observed(ours)


@contextmanager
def around(group: Any) -> Iterator[None]:
    """Every observer's context for an exchange along `group`."""
    with ExitStack() as contexts:
        for observer in observers:
            contexts.enter_context(observer(group))
        yield


def observed(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """An exchange whose first argument is a process group, of which observers hear."""

    @functools.wraps(exchange)
    def ours(process_group: Any, *args: Any, **named: Any) -> Any:
        if not observers:
            return exchange(process_group, *args, **named)
        with around(group_of(process_group)):
            return exchange(process_group, *args, **named)

    return ours


def kept() -> bool:
    """Whether the bridge is installed: the library's own functions are put aside, ours stand in their places."""
    return bool(_own)


def own(name: str) -> Any:
    """The library's own `ProcessGroupGloo.<name>`."""
    return _own[name]


def check_type(tensor: paddle.Tensor) -> paddle.Tensor:
    """Raises UsageError for a type that would end the process silently."""
    if (name := str(tensor.dtype).rpartition(".")[2]) not in CARRIED:
        raise UsageError(f"gloo cannot carry {name} tensors; cast to one of {', '.join(CARRIED)} first.")
    return tensor


def remember(process_group: Any, number: int, rank: int, ranks: list[int]) -> None:
    """Takes note of a process group just made: there may never be a Group of `paddle.distributed` around it."""
    _known[id(process_group)] = Known(process_group, number, rank, ranks)


def group_of(process_group: Any) -> Any:
    """What is known of a process group: its `id`, this rank in it (`rank`) and its global `ranks`."""
    if known := _known.get(id(process_group)):
        return known
    return next(g for g in collective._get_group_map_by_name().values() if g.process_group is process_group)


def process_group_of(group: Any) -> Any:
    """The process group of a Group, or of the default group for None."""
    return (group or collective._get_default_group()).process_group
