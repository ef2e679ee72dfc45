"""Paddle's own gloo collectives, kept aside before they are replaced; the bridge calls them wherever they are right."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddle_dp.errors import UsageError
from paddle_dp.mesh import rolls

if TYPE_CHECKING:
    import paddle

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


@dataclass(frozen=True)
class Known:
    """A process group that the bridge made: its number among the job's messages, this seat, the global ranks."""

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
    from paddle.base import core

    if not _own:
        _own.update({name: getattr(core.ProcessGroupGloo, name) for name in KEPT})
        _own.update({name: _on_the_roll(name, _own[name]) for name in KEPT[1:]})


def _on_the_roll(name: str, kept: Any) -> Any:
    """A collective that this rank is known to have come to, or not: whoever waits can say for whom."""
    seen: dict[int, tuple[Any, str, list[int]]] = {}

    @functools.wraps(kept)
    def ours(process_group: Any, *args: Any) -> Any:
        roll = rolls.here()
        if roll is None:
            return kept(process_group, *args)
        if id(process_group) not in seen:
            group = group_of(process_group)
            seen[id(process_group)] = process_group, f"group {group.id}", list(group.ranks)
        _, group_name, members = seen[id(process_group)]
        with roll.waiting(group_name, members, name):
            return kept(process_group, *args)

    return ours


def own(name: str) -> Any:
    """The library's own `ProcessGroupGloo.<name>`."""
    return _own[name]


def check_type(tensor: paddle.Tensor) -> paddle.Tensor:
    """Raises UsageError for a type that would end the process silently."""
    if (name := str(tensor.dtype).rpartition(".")[2]) not in CARRIED:
        raise UsageError(f"gloo cannot carry {name} tensors; cast to one of {', '.join(CARRIED)} first.")
    return tensor


def remember(process_group: Any, number: int, seat: int, ranks: list[int]) -> None:
    """Takes note of a process group just made: there may never be a Group of `paddle.distributed` around it."""
    _known[id(process_group)] = Known(process_group, number, seat, ranks)


def group_of(process_group: Any) -> Any:
    """What is known of a process group: its `id`, this seat (`rank`) and its global `ranks`."""
    if known := _known.get(id(process_group)):
        return known
    from paddle.distributed import collective

    return next(g for g in collective._get_group_map_by_name().values() if g.process_group is process_group)


def process_group_of(group: Any) -> Any:
    """The process group of a Group, or of the default group for None."""
    from paddle.distributed import collective

    return (group or collective._get_default_group()).process_group
