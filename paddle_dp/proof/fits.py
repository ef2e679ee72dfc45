"""Whether a comparison fits into this machine, told before anything is computed.

What a process holds at once is counted in docs/proof.md: its model in float64 with gradients and momentum, the weights
before an update, and one quantity on its way to the disk, where all of them lie until the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddle_dp.errors import UsageError

MEMORY, DISK = 40, 210  # bytes for each parameter, of a process that holds it, and of the whole model


def check_fits(
    parameters: int, held: Sequence[int], memory: int | None, disk: int, folder: str, wide: bool = True
) -> None:
    """Raises UsageError where a side cannot fit.

    `parameters` has the whole model, which one process holds, and `held` each of several ranks. `memory` (None: not
    known) and `disk`, in `folder`, are the bytes that are free. Without `wide` nothing is done in float64, which takes
    twice as much.
    """
    each, written = (MEMORY, DISK) if wide else (MEMORY // 2, DISK // 2)
    model = f"{parameters / 1e6:.1f} million parameters"
    wanted, alone = each * sum(held), each * parameters
    if memory is not None and max(wanted, alone) > memory:
        ranks = f"{len(held)} ranks take {_giga(wanted)}, and then " if len(held) > 1 else ""
        part = (
            ", let each rank hold a part (strategy.sharding, tensor or pipeline)" if alone <= memory else ""
        )
        raise UsageError(
            f"this comparison does not fit into memory: for a model of {model}, {ranks}one process takes "
            f"{_giga(alone)}, some {each} bytes for each parameter that a process holds, and {_giga(memory)} are free. "
            f"End what else runs here{part}, or compare a smaller model of the same layers (docs/proof.md)."
        )
    if written * parameters > disk:
        raise UsageError(
            f"this comparison does not fit on the disk: until it ends it keeps {_giga(written * parameters)} in "
            f"{folder}, some {written} bytes for each of {model}, and {_giga(disk)} are free there. Set TMPDIR to a "
            "folder with more room."
        )


def _giga(count: float) -> str:
    return f"{count / 2**30:.1f} GB"
