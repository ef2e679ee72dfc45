"""Do all ranks begin the same training? Recipe, code, packages, data and model are compared before anything is learned.

Ranks on one machine are started from one command, but nodes are started one by one, and a script computes what it likes
on each rank. What differs without an error (a batch size, a data set, a version) would be learned from in silence.

What may rightly differ: `output_dir` and `name` (the first rank's folder is taken), `loader` (how many workers a
machine has room for), and paths: another place of the same data, whose samples are compared, or of a file with the
same bytes.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle.optimizer import Optimizer

from paddle_dp.data.fingerprint import RANDOM, SECONDS, UNREAD, fingerprint
from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.parallel import Task
from paddle_dp.recipe import LoaderSettings
from paddle_dp.train.facts import Facts, file_crc, flat, packages, recipe_code, recipe_facts, task_facts

if TYPE_CHECKING:
    from paddle_dp.checkpoint import Checkpoint
    from paddle_dp.train.callback import Callback
    from paddle_dp.train.setup import Setup

_LONGEST = 100  # characters of a value in a message
SAME_START = "Start every node with the same recipe, overrides and package versions."
SAME_DATA = "Every rank must read the same data, in the same order: look at the paths, and at what is drawn at random."
_SEEDED = "random and numpy.random are seeded for each sample; Paddle's generator, or one of the data set's own, is not"
SAME_SCRIPT = "Every rank must describe the same training."


def compare(facts: Facts, mesh: Mesh, advice: str) -> None:
    """Raises UsageError, on every rank, unless all have the same `facts` (JSON values); the first that differs is
    named, with its values and who has them. Collective; where all is the same, it costs one small exchange.
    """
    if mesh.ranks == 1 or len(set(mesh.gather(_digest(facts)))) == 1:
        return
    rows = mesh.gather([json.loads(_text(facts)), mesh.host, _node(mesh)])
    tables = [row[0] for row in rows]
    key = next((key for key in _keys(tables) if not _may_differ([table.get(key) for table in tables])), None)
    if key is None:
        return
    holders: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        holders.setdefault(_shown(table[key]) if key in table else "nothing", []).append(rank)
    told = "; ".join(f"{value} on {_who(ranks, rows)}" for value, ranks in holders.items())
    raise UsageError(f"the ranks do not begin the same training. {key}: {told}. {advice}")


def compare_setups(setup: Setup, mesh: Mesh) -> None:
    """Packages, the code of parts or the script, and the resolved recipe or what the script says. Collective."""
    if mesh.ranks == 1:
        return
    recipe = setup.recipe
    if recipe is not None:
        compare({**packages(mesh), **recipe_code(recipe), **recipe_facts(recipe)}, mesh, SAME_START)
        return
    script = {"script": file_crc(getattr(sys.modules.get("__main__"), "__file__", None))}
    said = {
        "batch": setup.batch,
        "micro_batches": setup.micro_batches,
        "shuffle": setup.shuffle,
        "drop_last": setup.drop_last,
        "seed": setup.seed,
    }
    length = {"length": None if setup.length is None else str(setup.length)}
    strategy = flat("strategy", setup.strategy.settings)
    compare({**packages(mesh), **script, **said, **length, **strategy}, mesh, SAME_SCRIPT)


def compare_data(split: str, dataset: Any, seed: int, settings: LoaderSettings, mesh: Mesh) -> dict[str, str]:
    """How many samples there are, and what those are that can be read in a moment (`fingerprint`). Collective. Returns
    the fingerprint as far as all ranks have it, for the checkpoints to keep; {} for no data set.

    Samples that no rank can read are left out: the training will tell of them.
    """
    compare({f"samples in the {split} data": None if dataset is None else len(dataset)}, mesh, SAME_DATA)
    if dataset is None:
        return {}
    seconds = SECONDS if split == "training" else SECONDS / 4
    found = fingerprint(dataset, seed, bool(settings.num_workers), settings.timeout.seconds, seconds)
    mesh.wait("samples read")  # a slow disk may take longer than a collective may wait
    tables = mesh.gather(found) if mesh.ranks > 1 else [found]
    shared = [key for key in found if all(key in table for table in tables)]
    wanted = [key for key in shared if _can_be_compared([table[key] for table in tables])]
    compare({f"{key} of the {split} data": found[key] for key in wanted}, mesh, SAME_DATA)
    return {key: RANDOM if any(table[key] == RANDOM for table in tables) else found[key] for key in shared}


def _can_be_compared(texts: list[str]) -> bool:
    return RANDOM not in texts and not all(text.startswith(UNREAD) for text in texts)


def random_samples(split: str, found: Mapping[str, str]) -> list[str]:
    """A sentence for samples that are random in a way that nobody seeds, which are not one process's; or nothing."""
    key = next((key for key, text in found.items() if text == RANDOM), None)
    return [f"{key} of the {split} data {RANDOM}: {_SEEDED}"] if key else []


def compare_task(task: Task, mesh: Mesh) -> None:
    """The parameters' names, shapes and types before the model is placed, loss, optimizer, precision. Collective."""
    if mesh.ranks == 1:
        return
    rate = task.optimizer.get_lr() if isinstance(task.optimizer, Optimizer) else None
    facts = {**task_facts(task), "learning rate": rate, "precision": repr(task.precision)}
    for name, parameter in task.model.named_parameters():
        frozen = ", frozen" if parameter.stop_gradient else ""
        facts[f"parameter {name}"] = (
            f"{str(parameter.dtype).rpartition('.')[2]}{list(parameter.shape)}{frozen}"
        )
    compare(facts, mesh, SAME_SCRIPT)


def compare_checkpoints(found: Checkpoint, mesh: Mesh) -> None:
    """The checkpoint that each rank goes on from: its manifest has the checksums of all its files. Collective."""
    manifest = zlib.crc32((found.folder / "manifest.json").read_bytes())
    told = {"path": str(found.folder), "crc32": manifest}
    compare({"the checkpoint to go on from": told}, mesh, "Name the same checkpoint on every node.")


def compare_starts(step: int, total_steps: int, callbacks: Iterable[Callback], mesh: Mesh) -> None:
    """Where the training begins, how long it is, and when callbacks are due, which is collective work. Collective."""
    due = [f"{'every ' + str(c.every) if c.every else 'always'}{', reads' * c.reads}" for c in callbacks]
    facts = {"step to begin with": step, "steps in all": total_steps}
    compare({**facts, "callbacks": due}, mesh, SAME_SCRIPT)


def one_folder(folder: Path, mesh: Mesh) -> Path:
    """The run folder that all ranks use: the first rank's, which says so where others name another. Collective."""
    named = mesh.gather(str(folder))
    others = sorted(set(named) - {named[0]})
    if others and mesh.is_main:
        print(
            f"The ranks name different run folders (also {', '.join(others[:3])}): all use {named[0]}.",
            flush=True,
        )
    return Path(named[0])


def _may_differ(values: list[Any]) -> bool:
    """Whether they are the same, or paths to the same."""
    if all(isinstance(value, Mapping) and "path" in value for value in values):
        return len({value["crc32"] for value in values}) == 1
    return all(value == values[0] for value in values)


def _text(facts: Facts) -> str:
    """JSON; a number of NumPy's is a text in it."""
    return json.dumps(facts, default=str)


def _digest(facts: Facts) -> int:
    return zlib.crc32(_text(facts).encode())


def _keys(tables: Iterable[Facts]) -> list[str]:
    """The first rank's keys in their order, then those that only others have."""
    return list(dict.fromkeys(key for table in tables for key in table))


def _shown(value: Any) -> str:
    text = value["path"] if isinstance(value, Mapping) and "path" in value else value
    shown = text if isinstance(text, str) else json.dumps(text)
    return shown if len(shown) <= _LONGEST else shown[:_LONGEST] + "…"


def _node(mesh: Mesh) -> int | None:
    """Which of several nodes this is; None where there is one."""
    here = int(os.environ.get("PADDLE_LOCAL_SIZE") or mesh.ranks)
    return mesh.rank // here if here < mesh.ranks else None


def _who(ranks: list[int], rows: list[Any]) -> str:
    """«rank 1 (node 1, host b)», «ranks 0, 1, 2 (host a)»."""
    some = ", ".join(map(str, ranks[:8])) + (f", … ({len(ranks)} of them)" if len(ranks) > 8 else "")
    nodes = sorted({rows[rank][2] for rank in ranks if rows[rank][2] is not None})
    hosts = sorted({rows[rank][1] for rank in ranks})
    where = [f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes[:4]))}"] if nodes else []
    where.append(f"host {', '.join(hosts[:4])}")
    return f"rank{'s' * (len(ranks) > 1)} {some} ({'; '.join(where)})"
