"""Compares recipe, code, packages, data and model of all ranks before the first update: all must train the same.

Nodes are started one by one, and a script may differ between ranks. A batch size, a data set or a version that differs
would raise no error; the training would only be wrong.

These may differ: `output_dir` and `name` (rank 0's folder is taken), `loader` (machines have room for different numbers
of workers), and paths to the same data, since samples are compared, or to files with the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle.optimizer import Optimizer

from paddle_dp.data.collate import NEIGHBOUR_DEPENDENCE
from paddle_dp.data.fingerprint import COLLATING, FAULT, RANDOM, UNREAD, fingerprint
from paddle_dp.data.stream import Stream
from paddle_dp.errors import UsageError
from paddle_dp.identity.facts import Facts, TrainingSettings, are_same, packages, setup_facts, shown
from paddle_dp.identity.source_code import MODULE_PREFIX
from paddle_dp.identity.task_facts import task_facts
from paddle_dp.identity.walk import checksum
from paddle_dp.learner import Task
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.environment import MEMORY
from paddle_dp.recipe import LoaderSettings
from paddle_dp.text import numbered

if TYPE_CHECKING:
    from paddle_dp.checkpoint import Checkpoint

SAME_START = "Start every node with the same recipe, overrides and package versions."
SAME_DATA = "Every rank must read the same data, in the same order: look at the paths, and at random draws."
_SEEDED = "random and numpy.random are seeded for each sample; take, Paddle's generator and those of a data set are not"
SAME_SCRIPT = "Every rank must describe the same training."


def compare(facts: Facts, mesh: Mesh, advice: str) -> None:
    """Raises UsageError, on every rank, unless all have the same `facts` (JSON values). The message names the first
    that differs, its values and their ranks. Collective; if all are equal, it costs one small all_gather.
    """
    text = json.dumps(facts, default=str)  # NumPy numbers become strings
    if mesh.ranks == 1 or len(set(mesh.gather(checksum(text)))) == 1:
        return
    rows = mesh.gather([json.loads(text), mesh.host, _node(mesh)])
    tables = [row[0] for row in rows]
    key = next((key for key in _keys(tables) if not are_same(*(table.get(key) for table in tables))), None)
    if key is None:
        return
    ranks_of: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        ranks_of.setdefault(shown(table[key]) if key in table else "nothing", []).append(rank)
    values = "; ".join(f"{value} on {_named(ranks, rows)}" for value, ranks in ranks_of.items())
    raise UsageError(f"the ranks do not begin the same training. {key}: {values}. {advice}")


def compare_setups(setup: TrainingSettings, mesh: Mesh) -> None:
    """Compares packages, the code of parts or of the script, and the resolved recipe or the script's settings.
    Collective."""
    if mesh.ranks == 1:
        return
    facts = setup_facts(setup)
    if setup.scatters:  # only rank 0 needs to see the files at the data set's paths
        facts = {key: _as_text(fact) if key.startswith("dataset.") else fact for key, fact in facts.items()}
    common = set.intersection(*({*keys} for keys in mesh.gather(sorted(facts))))  # imports may differ
    facts = {key: fact for key, fact in facts.items() if key in common or not key.startswith(MODULE_PREFIX)}
    compare({**packages(mesh), **facts}, mesh, SAME_SCRIPT if setup.recipe is None else SAME_START)


def _as_text(fact: Any) -> Any:
    return fact["path"] if isinstance(fact, Mapping) and "path" in fact else fact


def compare_data(split: str, dataset: Any, seed: int, settings: LoaderSettings, mesh: Mesh) -> dict[str, str]:
    """Compares the number of samples and the fingerprint of some of them. Collective. Returns the part of the
    fingerprint that all ranks have, for the checkpoints; {} without a data set.

    Samples that no rank can read are left out: the training raises their error.
    """
    compare({f"samples in the {split} data": None if dataset is None else len(dataset)}, mesh, SAME_DATA)
    if dataset is None:
        return {}
    local_fingerprint = fingerprint(dataset, seed, bool(settings.num_workers), settings.timeout.seconds)
    mesh.wait("samples read")  # a slow disk may take longer than a collective waits
    tables = mesh.gather(local_fingerprint) if mesh.ranks > 1 else [local_fingerprint]
    _refuse_dependence(tables, f"the {split} data")
    shared = [key for key in local_fingerprint if all(key in table for table in tables)]
    comparable = [key for key in shared if _is_comparable([table[key] for table in tables])]
    compare({f"{key} of the {split} data": local_fingerprint[key] for key in comparable}, mesh, SAME_DATA)
    return {
        key: RANDOM if any(table[key] == RANDOM for table in tables) else local_fingerprint[key]
        for key in shared
    }


def data_of_main(dataset: Any, seed: int, settings: LoaderSettings, mesh: Mesh) -> dict[str, str]:
    """Returns, on every rank, the fingerprint of the data that only the main rank reads. Collective."""
    local_fingerprint = {}
    once = isinstance(dataset, Stream) and dataset.is_once  # samples read here would have to be kept
    if mesh.is_main and dataset is not None and not once:
        local_fingerprint = fingerprint(dataset, seed, bool(settings.num_workers), settings.timeout.seconds)
    mesh.wait("samples read")
    main_fingerprint: dict[str, str] = mesh.gather(local_fingerprint)[0]
    _refuse_dependence([main_fingerprint], "the data that rank 0 reads")
    return main_fingerprint


def _refuse_dependence(fingerprints: Iterable[Mapping[str, str]], data_name: str) -> None:
    """Raises UsageError if a sample depends on the others of its batch, or on later reads."""
    for table in fingerprints:
        if FAULT in table:
            raise UsageError(f"{data_name}: {table[FAULT]}.")
        if (dependence := table.get(COLLATING, "")).startswith(NEIGHBOUR_DEPENDENCE):
            raise UsageError(f"{data_name}: {dependence}")


def _is_comparable(texts: list[str]) -> bool:
    return RANDOM not in texts and not all(text.startswith(UNREAD) for text in texts)


def random_samples(split: str, fingerprint: Mapping[str, str]) -> list[str]:
    """[a sentence] if samples are random without a seed, and so differ from one process's; else []."""
    key = next((key for key, text in fingerprint.items() if text == RANDOM), None)
    return [f"{key} of the {split} data {RANDOM}: {_SEEDED}"] if key else []


def compare_task(task: Task, mesh: Mesh) -> None:
    """Compares parameter names, shapes and dtypes before placement, loss, optimizer and precision. Collective."""
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


def compare_checkpoints(checkpoint: Checkpoint, mesh: Mesh) -> None:
    """Compares the checkpoints that the ranks resume from, by their manifests, which hold the checksums of all files.
    Collective."""
    manifest = checksum((checkpoint.folder / "manifest.json").read_bytes())
    path, memory = str(checkpoint.folder), os.environ.get(MEMORY)
    resumed = {"path": path.replace(memory, "memory") if memory else path, "crc32": manifest}
    compare({"the checkpoint to resume": resumed}, mesh, "Name the same checkpoint on every node.")


def compare_starts(
    step: int, total_steps: int, callbacks: Iterable[Any], metrics: Sequence[str], mesh: Mesh
) -> None:
    """Compares the first step, the length, when callbacks are due, and the names of metrics, since they do collective
    work. Collective."""
    due = [f"{'every ' + str(c.every) if c.every else 'always'}{', reads' * c.reads}" for c in callbacks]
    facts = {"step to begin with": step, "steps in all": total_steps}
    compare({**facts, "callbacks": due, "metrics": metrics}, mesh, SAME_SCRIPT)


def agreed_folder(folder: Path, mesh: Mesh) -> Path:
    """The run folder that all ranks use: rank 0's. Prints a line if other ranks named another. Collective."""
    named = mesh.gather(str(folder))
    other_folders = sorted(set(named) - {named[0]})
    if other_folders and mesh.is_main:
        print(
            f"The ranks name different run folders (also {', '.join(other_folders[:3])}): all use {named[0]}.",
            flush=True,
        )
    return Path(named[0])


def _keys(tables: Iterable[Facts]) -> list[str]:
    """The first rank's keys in their order, then the keys that only others have."""
    return list(dict.fromkeys(key for table in tables for key in table))


def _node(mesh: Mesh) -> int | None:
    """This rank's node, from 0; None on a single node."""
    here = int(os.environ.get("PADDLE_LOCAL_SIZE") or mesh.ranks)
    return mesh.rank // here if here < mesh.ranks else None


def _named(ranks: list[int], rows: list[Any]) -> str:
    """ "rank 1 (node 1, host b)", "ranks 0, 1, 2 (host a)"."""
    nodes = sorted({rows[rank][2] for rank in ranks if rows[rank][2] is not None})
    hosts = sorted({rows[rank][1] for rank in ranks})
    where = [f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes[:4]))}"] if nodes else []
    where.append(f"host {', '.join(hosts[:4])}")
    return f"{numbered('rank', ranks, 8)} ({'; '.join(where)})"
