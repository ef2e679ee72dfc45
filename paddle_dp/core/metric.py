"""Metrics: scores over all held-out samples, from sums, from all outputs, or from the evaluation's other numbers."""

from __future__ import annotations

import base64
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.structure import leaves, structure_of, unflatten

MAX_BYTES = 4 << 30  # of outputs and targets of all held-out samples, which every rank will hold
_TARGETS = ("y_true", "true", "truth", "target", "targets", "label", "labels", "y")
Scores = dict[str, float]


class Metric:
    """A callable of (outputs, targets), or an object with `compute`, as the evaluation uses it.

    A function gets the NumPy arrays of all held-out samples, in the data set's order, and returns a number; one with
    `names` returns {name: number}. An object with `sums(outputs, targets)` gets the tensors of one micro-batch, and
    returns {name: number or array} to be added up over all of them; `compute` makes its scores of the totals. `compute`
    without `sums` gets the evaluation's other numbers. A method `refuse(loss)` raises UsageError for a loss with
    which the scores would be wrong.
    """

    def __init__(self, function: Any, setting: str):
        self.function, self.setting = function, setting
        self.adds = hasattr(function, "sums")
        self.derives = hasattr(function, "compute") and not self.adds
        named = getattr(function, "names", None)
        self.names: tuple[str, ...] = tuple(named) if named else (_name(function),)
        self._single = named is None
        if not self.adds and not self.derives:
            _refuse_order(function, setting)

    def arrays(self, outputs: Any, targets: Any) -> dict[str, Any]:
        """The sums of a micro-batch by name, or its rows: {"outputs": …, "targets": …} of arrays [n, …]."""
        if self.adds:
            return {name: _array(value) for name, value in self.function.sums(outputs, targets).items()}
        return {"outputs": _arrays(outputs), "targets": _arrays(targets)}

    def scores(self, collected: Any) -> Scores:
        """The scores of what all ranks collected. Raises UsageError if they are no numbers."""
        if self.adds or self.derives:
            result = self.function.compute(collected)
        else:
            result = self.function(collected["outputs"], collected["targets"])
        result = {self.names[0]: result} if self._single else result
        if not isinstance(result, Mapping) or set(result) != set(self.names):
            raise UsageError(
                f"{self.setting} must return a number for each of {', '.join(self.names)}: {result!r:.200}"
            )
        return {name: self._number(name, value) for name, value in result.items()}

    def _number(self, name: str, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise UsageError(f"{self.setting}: {name} must be a number, and is {value!r:.200}") from None


def metrics_of(functions: Sequence[tuple[str, Any]], loss: Any) -> tuple[Metric, ...]:
    """The metrics of (setting, function). Raises UsageError for two with one name, and for one that refuses `loss`."""
    metrics = tuple(Metric(function, setting) for setting, function in functions)
    by_name: dict[str, Metric] = {}
    for metric in metrics:
        for name in metric.names:
            if (other := by_name.setdefault(name, metric)) is not metric:
                raise UsageError(
                    f"{other.setting} and {metric.setting} both give {name}: leave one of them out."
                )
        if (refuse := getattr(metric.function, "refuse", None)) is not None:
            refuse(loss)
    return metrics


class Collected:
    """What this rank collected for one metric."""

    def __init__(self, metric: Metric, samples: int):
        self.metric, self._samples = metric, samples
        self._sums: dict[str, np.ndarray] = {}
        self._structure: Any = None
        self._rows: list[tuple[list[int], list[np.ndarray]]] = []

    def add(self, key: Sequence[int], outputs: Any, targets: Any, samples: int) -> None:
        """Adds a micro-batch; rows are ordered by `key`. Raises UsageError if the rows of all samples are too large."""
        arrays = self.metric.arrays(outputs, targets)
        if self.metric.adds:
            for name, value in arrays.items():
                self._sums[name] = self._sums[name] + value if name in self._sums else value
            return
        if not self._rows:
            self._structure = structure_of(arrays)
        rows = [array[:samples] for array in leaves(arrays)]
        self._refuse_large(sum(array.nbytes for array in rows) / max(samples, 1) * self._samples)
        self._rows.append(([*key], rows))

    def _refuse_large(self, total: float) -> None:
        if total > MAX_BYTES:
            raise UsageError(
                f"{self.metric.setting} needs the outputs and targets of all {self._samples} held-out samples on every "
                f"rank, {total / 2**30:.1f} GB, and at most {MAX_BYTES / 2**30:.0f} GB are gathered: write it as an "
                "object with sums(outputs, targets) and compute(sums) (docs/metrics.md)."
            )

    def gathered(self, mesh: Mesh) -> list[Any]:
        """[rank, content] of each rank that collected something. Collective."""
        if self.metric.derives:
            return []
        held = bool(self._sums or self._rows)
        return [row for row in mesh.gather([mesh.rank, self._encoded()] if held else None) if row]

    def scores(self, mesh: Mesh, gathered: list[Any], numbers: Scores) -> Scores:
        """The scores of all ranks' samples, the same on every rank; `numbers`: the evaluation's others. Collective.

        Raises UsageError, on every rank, if the metric fails.
        """
        if self.metric.derives:
            return self.metric.scores(numbers)
        answer: Any = None
        if gathered and gathered[0][0] == mesh.rank:  # the first that saw outputs computes for all
            answer = self._answer([content for _, content in gathered])
        answers = [each for each in mesh.gather(answer) if each]
        if not answers or "error" in answers[0]:
            raise UsageError(f"{self.metric.setting} {answers[0]['error'] if answers else 'saw no sample'}")
        return {name: float(value) for name, value in answers[0]["scores"].items()}

    def _answer(self, contents: list[Any]) -> dict[str, Any]:
        try:
            return {"scores": {name: repr(value) for name, value in self._computed(contents).items()}}
        except PaddleDPError as error:
            return {"error": f"cannot be computed: {error}"}
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and all ranks end with it
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            return {"error": f"failed on the {self._samples} held-out samples: {where}"}

    def _computed(self, contents: list[Any]) -> Scores:
        if self.metric.adds:
            totals: dict[str, np.ndarray] = {}
            for content in contents:
                for name, value in content.items():
                    array = _decoded(value)
                    totals[name] = totals[name] + array if name in totals else array
            return self.metric.scores(totals)
        ordered = sorted((row for content in contents for row in content), key=lambda row: row[0])
        columns = zip(*([_decoded(array) for array in arrays] for _, arrays in ordered), strict=True)
        return self.metric.scores(unflatten(self._structure, [np.concatenate(column) for column in columns]))

    def _encoded(self) -> Any:
        """JSON; arrays keep every bit."""
        if self.metric.adds:
            return {name: _encode(value) for name, value in self._sums.items()}
        return [[key, [_encode(array) for array in arrays]] for key, arrays in self._rows]


def _name(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "metric" if name == "<lambda>" else str(name)


def _refuse_order(function: Callable[..., Any], setting: str) -> None:
    """Raises UsageError for a function that takes targets first, as scikit-learn's: the scores would be wrong."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return
    if parameters and parameters[0] in _TARGETS:
        raise UsageError(
            f"{setting} takes {parameters[0]} first, and a metric is called with (outputs, targets): write a function, "
            f"such as def score(outputs, targets): return {_name(function)}(targets, outputs.argmax(-1))."
        )


def _arrays(value: Any) -> Any:
    return unflatten(structure_of(value), [_array(leaf) for leaf in leaves(value)])


def _array(value: Any) -> np.ndarray:
    """A tensor or number as an array, 16-bit floats as float32: NumPy has no bfloat16."""
    if isinstance(value, paddle.Tensor):
        value = value.astype("float32") if value.dtype in (paddle.bfloat16, paddle.float16) else value
        return value.numpy()
    return np.asarray(value)


def _encode(array: np.ndarray) -> list[Any]:
    return [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _decoded(row: list[Any]) -> np.ndarray:
    dtype, shape, content = row
    return np.frombuffer(base64.b64decode(content), dtype).reshape(shape)
