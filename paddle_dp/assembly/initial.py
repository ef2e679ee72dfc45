"""Loads the weights of an earlier training, or published ones, into a new training: each rank reads its slices.

Only weights and buffers are loaded: the optimizer, the progress and the order of samples begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paddle_dp.checkpoint import fill
from paddle_dp.checkpoint.matching import match, table
from paddle_dp.checkpoint.other_names import Tables, names_of, translated
from paddle_dp.checkpoint.source import source
from paddle_dp.core.placed_model import PlacedModel
from paddle_dp.errors import CheckpointError, PaddleDPError, RecipeError
from paddle_dp.learner import Task
from paddle_dp.mesh import Mesh
from paddle_dp.model.initial_weights import draw
from paddle_dp.recipe import Load
from paddle_dp.recipe.write import RESOLVED
from paddle_dp.recipe.yaml_document import read_page


def other_settings(path: Path, model: Mapping[str, Any]) -> list[str]:
    """A line for each model setting that differs from the run at `path`, a run's folder or checkpoint: weights of equal
    shapes also fit a different model. `model`: the present settings, with `use`."""
    run = next((folder for folder in (path, *path.parents[:2]) if (folder / RESOLVED).is_file()), None)
    try:
        before = read_page(run / RESOLVED).values.get("model") if run is not None else None
    except RecipeError:
        return []
    if not isinstance(before, Mapping) or before.get("use") != model.get("use"):
        return []
    keys = [
        key for key in model if key in before and key not in ("use", "from") and before[key] != model[key]
    ]
    return [f"  model.{key} was {before[key]} there and is {model[key]} here" for key in keys]


def load_full(load: Load, task: Task, mesh: Mesh) -> None:
    """Loads the weights of `load` into a task's model before placement, on one process: a proof then changes them.
    Raises the errors of `initial_weights`."""
    draw(task.model)
    initial_weights(load, task)(PlacedModel(model=task.model, mesh=mesh))


def initial_weights(load: Load, task: Task) -> Callable[[PlacedModel], list[str]]:
    """Returns a function that loads the weights of `load` into the task's model when it is placed: each rank reads its
    slices. It returns a table of the result. No weights are expected for an adapter's tensors.

    The function is collective. It raises UsageError or CheckpointError, the same on every rank.
    """
    tables = names_of(task.model)  # a placed model has other layers
    return lambda placed: _load(load, placed, tables, task.added)


def _load(load: Load, placed: PlacedModel, tables: Tables, added: frozenset[str]) -> list[str]:
    import paddle

    mesh = placed.mesh
    tensors = {name: tensor for name, tensor in placed.state().items() if name not in added}
    opened = _together(mesh, lambda: source(Path(load.path).expanduser()))
    weights, origins = translated(opened, tables, load.rename, load.only)
    local_shapes = {
        name: list(placed.placements.placement_of(tensor).global_shape(tensor.shape))
        for name, tensor in tensors.items()
    }
    here = {name: tuple(shape) for shapes in mesh.gather(local_shapes) for name, shape in shapes.items()}
    there = {name: weights.shape(name) for name in weights.names}
    matched = match(there, here, load, weights.called)
    loaded, tied = set(matched.loaded), dict[str, list[str]]()
    for group in tables.tied:
        if names := [name for name in group if name in loaded]:
            tied |= dict.fromkeys(group, names)  # stages of a pipeline have copies, each under its own name

    def read() -> None:
        with paddle.no_grad():
            for name, tensor in tensors.items():
                if name in loaded or name in tied:
                    placement, shape = placed.placements.placement_of(tensor), tensor.shape
                    offset = placement.offset(shape)
                    if name in tied:
                        weights.refuse_untied(tied[name], offset, shape, copies=not load.only)
                    source_name = tied.get(name, [name])[0]
                    fill(tensor, weights, source_name, placement.global_shape(shape), offset)

    _together(mesh, read)
    return table(matched, there, here, load, weights, origins)


def _together(mesh: Mesh, work: Any) -> Any:
    """Returns this rank's result of `work`; if a rank fails, raises the first one's error on all. Collective."""
    result, error = None, ""
    try:
        result = work()
    except (PaddleDPError, OSError) as failure:
        error = str(failure)
    mesh.wait("weights read")
    if first := next(filter(None, mesh.gather(error)), ""):
        raise CheckpointError(first)
    return result
