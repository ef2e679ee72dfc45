"""Makes a folder in memory for a job's checkpoints (the callback `memory_checkpoint`), and frees it at the job's end.

The folder lies in /dev/shm, and only its owner can read it. At the end of the job this process removes it; after a kill
of this process, a small one that waits for that; after a kill of both, the next `paddle-dp train` of this user, for the
folder is locked as long as its job lives (launch/scratch.py).

On several nodes each node's process makes one, and tells the others which checkpoints are in it (`stock`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import TYPE_CHECKING, Any

from paddle_dp.errors import UsageError
from paddle_dp.launch.processes import text_of
from paddle_dp.launch.scratch import remove_abandoned, scratch_folder
from paddle_dp.text import plural

if TYPE_CHECKING:
    from paddle_dp.checkpoint.node_copies import Generation
    from paddle_dp.launch.command import LaunchPlan
    from paddle_dp.recipe import Recipe

JOB = "job"  # in the folder, until it is removed: the digest of the job's recipe, run folder and layout
CALLBACK, PREFIX, FOLDER = "memory_checkpoint", "paddle-dp-memory-", Path("/dev/shm")
# Standard input ends with the process that holds its other end. Ranks that die meanwhile may still make a file.
_REMOVER = 'cat; for n in 1 2 3 4 5; do rm -rf -- "$1"; [ -e "$1" ] || exit 0; sleep 1; done'


@contextmanager
def memory_folder(recipe: Recipe, plan: LaunchPlan) -> Iterator[Path | None]:
    """Yields the folder if the recipe's training keeps checkpoints in memory, else None; removes folders of jobs that
    were killed. Raises UsageError for a job that cannot keep any."""
    if plan.job.entry_point != "train":
        yield None
        return
    remove_abandoned(PREFIX, FOLDER)
    if not refuse_memory(recipe, plan.job.restarts, plan.nodes, "Add --restarts 3, or leave it out."):
        yield None
        return
    if not FOLDER.is_dir():
        raise UsageError(f"callbacks.{CALLBACK}: this system has no {FOLDER}. Leave it out.")
    with scratch_folder(PREFIX, FOLDER) as folder, _removed_after_kill(folder):
        (folder / "checkpoints").mkdir()  # ranks make none: they may live a moment longer than the folder
        if plan.nodes > 1:
            text = recipe.model_dump_json().encode()
            (folder / JOB).write_text(blake2b(text, digest_size=16).hexdigest())
        yield folder


def refuse_memory(recipe: Recipe, restarts: int, nodes: int, advice: str) -> bool:
    """Returns True if the recipe's training keeps checkpoints in memory. Raises UsageError if a job with so many
    restarts and nodes cannot; `advice` is for a job without restarts."""
    if not any(component.name == CALLBACK for component in recipe.callbacks):
        return False
    reason = ""
    if not restarts:
        reason = f"it serves the restarts of a job, and its memory is freed at the job's end. {advice}"
    elif nodes > 1 and recipe.strategy.config.may_lose_ranks:
        reason = (
            "on several nodes a rank that this strategy goes on without would have no copies. Leave it out."
        )
    if reason:
        raise UsageError(f"callbacks.{CALLBACK}: {reason}")
    return True


def stock(memory: Path | None) -> dict[str, Any] | None:
    """Returns the checkpoints in a node's memory as JSON, for the other nodes; None without a memory. Reads every byte
    of them."""
    if memory is None:
        return None
    from paddle_dp.checkpoint.node_copies import generations  # imports NumPy, which few jobs need here

    rows = [[g.step, g.key, g.ranks, _spans(g.intact)] for g in generations(memory / "checkpoints")]
    return {"job": text_of(memory / JOB), "generations": rows}


def newest_generation(stocks: Iterable[Any], memory: Path | None) -> tuple[Generation | None, str]:
    """Returns the newest checkpoint of which the nodes' memories have all files, and in brackets why there is none, or
    no newer one.

    `stocks`: of the nodes that take part. Stocks of another job, or in another version's form, do not count.
    """
    from paddle_dp.checkpoint.node_copies import Generation, newest_complete

    job, rows, foreign = "" if memory is None else text_of(memory / JOB), [], 0
    for each in stocks:
        try:
            if not job or each["job"] != job:
                raise ValueError("another job's")
            rows.append(
                [Generation(int(s), str(k), int(n), _ranks(r, int(n))) for s, k, n, r in each["generations"]]
            )
        except (TypeError, KeyError, ValueError):
            foreign += 1
    generation, reason = newest_complete(rows)
    if foreign:
        reason = f"{reason}{'; ' * bool(reason)}the memory of {plural(foreign, 'node')} is another job's"
    return generation, f" ({reason})" if reason else ""


def _spans(ranks: Iterable[int]) -> list[list[int]]:
    """Returns ascending ranks as [first, last] of each gapless span: messages between nodes have bounded sizes."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return spans


def _ranks(spans: Iterable[Iterable[int]], count: int) -> tuple[int, ...]:
    """Returns the ranks of `_spans` that are below `count`."""
    return tuple(rank for first, last in spans for rank in range(int(first), min(int(last), count - 1) + 1))


@contextmanager
def _removed_after_kill(folder: Path) -> Iterator[None]:
    """Starts a process that removes the folder when this one is gone."""
    remover = Popen(
        ["/bin/sh", "-c", _REMOVER, "sh", str(folder)],
        stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        assert remover.stdin is not None
        remover.stdin.close()
        remover.wait()
