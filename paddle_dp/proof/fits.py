"""Checks, before anything is computed, that a comparison fits into this machine's memory and disk.

docs/proof.md counts what a process needs: its model in float64 with gradients and momentum, the weights before an
update, and one quantity on its way to the disk, where all are kept until the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddle_dp.errors import UsageError

MEMORY, DISK = 40, 210  # bytes per parameter: that a process holds, and of the whole model


def check_fits(
    parameters: int, held: Sequence[int], memory: int | None, disk: int, folder: str, wide: bool = True
) -> None:
    """Raises UsageError if a side does not fit.

    `parameters`: of the whole model, which one process holds; `held`: of each rank. `memory` (None: not known) and
    `disk`, in `folder`: free bytes. Without `wide` nothing is done in float64, which needs twice as much.
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
