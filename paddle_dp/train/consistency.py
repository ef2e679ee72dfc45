"""Do all ranks begin the same training? Recipe, code, packages, data and model are compared before anything is learned.

Ranks on one machine are started from one command, but nodes are started one by one, and a script computes what it likes
on each rank. What differs without an error (a batch size, a data set, a version) would be learned from in silence.

What may rightly differ: `out` and `name` (the first rank's folder is taken), `loader` (how many workers a machine has
room for), and paths: another place of the same data, whose samples are compared, or of a file with the same bytes.
"""

from __future__ import annotations

import glob
import inspect
import json
import os
import platform
import sys
import zlib
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp.data.fingerprint import RANDOM, UNREAD, fingerprint
from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.parallel import Task
from paddle_dp.part import Part
from paddle_dp.recipe import LoaderSettings, Recipe

if TYPE_CHECKING:
    from paddle_dp.checkpoint import Checkpoint
    from paddle_dp.train.assemble import Setup
    from paddle_dp.train.trainer import Trainer

Facts = Mapping[str, Any]
MAY_DIFFER = ("out", "name", "loader")
_PLACES = ("rank", "device", "place", "host", "path", "folder", "dir", "file", "name", "training")
_LONGEST = 100  # characters of a value in a message
_LARGEST = 2**28  # bytes of a file that is worth reading to compare it

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
        parts = (
            recipe.model,
            recipe.dataset,
            recipe.loss,
            recipe.optimizer,
            recipe.schedule,
            recipe.strategy,
        )
        files = {f"code of {p.shelf} {p.name}": code for p in parts if p is not None and (code := _code(p))}
        compare({**packages(mesh), **files, **recipe_facts(recipe)}, mesh, SAME_START)
        return
    script = {"script": _file_crc(getattr(sys.modules.get("__main__"), "__file__", None))}
    said = {word: getattr(setup, word) for word in ("batch", "micros", "shuffle", "last", "seed")}
    length = {"length": None if setup.length is None else str(setup.length)}
    strategy = _flat("strategy", setup.strategy.settings)
    compare({**packages(mesh), **script, **said, **length, **strategy}, mesh, SAME_SCRIPT)


def compare_data(split: str, dataset: Any, seed: int, settings: LoaderSettings, mesh: Mesh) -> list[str]:
    """How many samples there are, and what some of them are. Collective. Returns a sentence for samples that are random
    in a way that nobody seeds, which are not one process's; or nothing.

    Those that no rank can read are left out: the training will tell of them.
    """
    if mesh.ranks == 1:
        return []
    compare({f"samples in the {split} data": None if dataset is None else len(dataset)}, mesh, SAME_DATA)
    if dataset is None:
        return []
    found = fingerprint(dataset, seed, bool(settings.workers), settings.timeout.seconds)
    mesh.wait("samples read")  # a slow disk may take longer than a collective may wait
    if len(set(mesh.gather(_digest(found)))) > 1:
        unread = [name for name, text in found.items() if text.startswith(UNREAD)]
        left_out = set.intersection(*map(set, mesh.gather(unread)))
        compare(
            {f"{n} of the {split} data": text for n, text in found.items() if n not in left_out},
            mesh,
            SAME_DATA,
        )
    random = next((name for name, text in found.items() if text == RANDOM), None)  # on all ranks alike
    return [f"{random} of the {split} data {RANDOM}: {_SEEDED}"] if random else []


def compare_task(task: Task, mesh: Mesh) -> None:
    """The parameters' names, shapes and types before the model is placed, loss, optimizer, precision. Collective."""
    if mesh.ranks == 1:
        return
    optimizer = task.optimizer
    rate = optimizer.get_lr() if hasattr(optimizer, "get_lr") else None
    facts: dict[str, Any] = {
        "model": _kind(task.model),
        "loss": _kind(task.loss.given),
        "optimizer": _kind(optimizer),
    }
    facts |= {"learning rate": rate, "precision": repr(task.precision)}
    facts |= {f"loss.{name}": value for name, value in _settings(task.loss.given).items()}
    for name, layer in task.model.named_sublayers(include_self=True):
        within = f"model.{name}" if name else "model"
        facts |= {f"{within}.{word}": value for word, value in _settings(layer).items()}
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


def compare_starts(trainer: Trainer) -> None:
    """Where the training begins, how long it is, and when callbacks are due, which is collective work. Collective."""
    callbacks = [
        f"{'every ' + str(c.every) if c.every else 'always'}{', reads' * c.reads}" for c in trainer.callbacks
    ]
    facts = {"step to begin with": trainer.progress.step, "steps in all": trainer.total_steps}
    compare({**facts, "callbacks": callbacks}, trainer.mesh, SAME_SCRIPT)


def one_folder(folder: Path, mesh: Mesh) -> Path:
    """The run folder that all ranks use: the first rank's, which says so where others name another. Collective."""
    named = mesh.gather(str(folder))
    others = sorted(set(named) - {named[0]})
    if others and mesh.is_first:
        print(
            f"The ranks name different run folders (also {', '.join(others[:3])}): all use {named[0]}.",
            flush=True,
        )
    return Path(named[0])


def packages(mesh: Mesh) -> dict[str, Any]:
    """The versions that decide what is computed. Python's last number does not."""
    import numpy
    import paddle

    import paddle_dp

    return {
        "package paddle_dp": f"{paddle_dp.__version__} (its files: {_sources():08x})",
        "package paddle": paddle.__version__,
        "package numpy": numpy.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": mesh.device.partition(":")[0],
    }


def recipe_facts(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe by dotted key, without what may differ."""
    content = recipe.model_dump(mode="json")
    kept = {key: value for key, value in content.items() if key not in MAY_DIFFER}
    return {name: fact for key, value in kept.items() for name, fact in _flat(key, value).items()}


def _flat(name: str, value: Any) -> dict[str, Any]:
    """{"train": {"batch": 64}} → {"train.batch": 64}; paths are told from other texts."""
    if isinstance(value, Mapping):
        return {n: v for key, inner in value.items() for n, v in _flat(f"{name}.{key}", inner).items()}
    if isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        return {n: v for at, inner in enumerate(value) for n, v in _flat(f"{name}.{at}", inner).items()}
    return {name: _path(value, content=not name.startswith("dataset.")) if isinstance(value, str) else value}


def _path(text: str, content: bool) -> Any:
    """A text, or, where it leads to something on this disk, {"path": …} with the checksum of a file's `content`."""
    place = os.path.expanduser(text)
    there = os.path.exists(place) or (glob.has_magic(place) and bool(glob.glob(place)))
    if not there or os.sep not in place:
        return text
    return {"path": text, "crc32": _file_crc(place) if content else None}


def _may_differ(values: list[Any]) -> bool:
    """Whether they are the same, or paths to the same."""
    if all(isinstance(value, Mapping) and "path" in value for value in values):
        return len({value["crc32"] for value in values}) == 1
    return all(value == values[0] for value in values)


@cache
def _sources() -> int:
    """One number from all files of this package: a version says little about a clone."""
    import paddle_dp

    folder, found = Path(paddle_dp.__file__).parent, 0
    for file in sorted(folder.rglob("*.py")):
        found = zlib.crc32(file.read_bytes(), zlib.crc32(str(file.relative_to(folder)).encode(), found))
    return found


def _code(part: Part) -> str | None:
    """The checksum of the file that a part stands in; None for this package and Paddle: versions are told."""
    kind = getattr(type(part.config), "called", type(part.config))
    if (getattr(kind, "__module__", None) or "").partition(".")[0] in ("paddle_dp", "paddle"):
        return None
    try:
        return _file_crc(inspect.getsourcefile(kind))
    except TypeError:
        return None


def _file_crc(file: str | None) -> str | None:
    if file is None or not os.path.isfile(file) or os.path.getsize(file) > _LARGEST:
        return None
    return f"CRC-32 {zlib.crc32(Path(file).read_bytes()):08x}"


def _kind(thing: Any) -> str:
    """«paddle.nn.layer.common.Linear»; a function's own name."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def _settings(thing: Any) -> dict[str, Any]:
    """The plain numbers and words that an object was made with, a partial's and a closure's too. What names a place
    (a rank, a device) may differ."""
    if isinstance(thing, partial):
        return {**_settings(thing.func), **_plain(thing.keywords)}
    if inspect.isfunction(thing):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        closed = {name: cell.cell_contents for name, cell in cells if cell != type(cell)()}
        return _plain({**closed, **(thing.__kwdefaults__ or {})})
    return _plain(getattr(thing, "__dict__", {}))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (bool, int, float, str))
        and not name.startswith("_")
        and not any(word in name.lower() for word in _PLACES)
    }


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
