"""Saves Paddle's gloo collectives before they are replaced; the bridge calls them where they are correct."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.base import core
from paddle.distributed import collective

from paddle_dp.errors import UsageError
from paddle_dp.mesh import late_ranks
from paddle_dp.mesh.transport import traffic
from paddle_dp.tensors import dtype_of, nbytes

SAVED = (
    "create", "all_reduce",
    "all_gather", "all_gather_into_tensor", "broadcast", "scatter", "scatter_tensor", "gather",
)  # fmt: skip
# For any other dtype gloo ends the process with exit(-1) and no message (GENERATE_FUNC in process_group_gloo.cc).
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8", "bool")
_originals: dict[str, Any] = {}


@dataclass(frozen=True)
class GroupInfo:
    """A process group that the bridge made: its id in the job's messages, this rank in it, and the global ranks."""

    process_group: Any  # a reference, so that no other object gets its id()
    id: int
    rank: int
    ranks: list[int]


_groups: dict[int, GroupInfo] = {}  # by id() of the process group


class CompletedTask:
    """A task that is complete when it is returned: gloo's collectives are synchronous."""

    def wait(self, *_: Any) -> bool:
        return True

    is_completed = synchronize = wait


def save() -> None:
    """Saves the library's functions. Only the first call acts: a later one would save the replacements."""
    if not _originals:
        _originals.update({name: getattr(core.ProcessGroupGloo, name) for name in SAVED})
        _originals.update({name: _reporting_late_ranks(name, _originals[name]) for name in SAVED[1:]})


def _reporting_late_ranks(name: str, original: Any) -> Any:
    """Wraps a collective: counts its bytes, and lets a rank that waits long name the late ranks."""

    @functools.wraps(original)
    def counted(process_group: Any, *args: Any) -> Any:
        _count(name, process_group.size(), args)
        group = group_of(process_group)
        with late_ranks.waiting(f"group {group.id}", group.ranks, name):
            return original(process_group, *args)

    return counted


def _count(name: str, ranks: int, args: Sequence[Any]) -> None:
    """Adds a collective's bytes to this process's traffic; its largest tensor is the full one."""
    size = max((_bytes(each) for each in args), default=0)
    (traffic.all_reduced if name == "all_reduce" else traffic.reduced)(size, ranks)


def _bytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return nbytes(value) if isinstance(value, paddle.Tensor) else 0


def original(name: str) -> Any:
    """Returns the library's `ProcessGroupGloo.<name>`; collectives report late ranks."""
    return _originals[name]


def check_dtype(tensor: paddle.Tensor) -> paddle.Tensor:
    """Returns `tensor`. Raises UsageError for a dtype at which gloo would end the process without a message."""
    if (name := dtype_of(tensor)) not in DTYPES:
        raise UsageError(f"gloo cannot carry {name} tensors; cast to one of {', '.join(DTYPES)} first.")
    return tensor


def register(process_group: Any, number: int, rank: int, ranks: list[int]) -> None:
    """Registers a new process group, as `paddle.distributed` may never make a Group for it."""
    _groups[id(process_group)] = GroupInfo(process_group, number, rank, ranks)


def group_of(process_group: Any) -> Any:
    """Returns an object with a process group's `id`, this rank in it (`rank`) and its global `ranks`."""
    if info := _groups.get(id(process_group)):
        return info
    return next(g for g in collective._get_group_map_by_name().values() if g.process_group is process_group)


def process_group_of(group: Any) -> Any:
    """Returns the process group of a Group; None is the default group."""
    return (group or collective._get_default_group()).process_group
