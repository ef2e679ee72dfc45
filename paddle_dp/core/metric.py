"""Metrics: scores over all held-out samples, from sums, from all outputs, or from the evaluation's other numbers."""

from __future__ import annotations

import copy
import inspect
import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from paddle_dp.batch import Batch, MicroBatch, leaves, mapped, structure_of, unflatten
from paddle_dp.core.paddle_metric import PaddleMetric
from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.mesh import Mesh

MAX_BYTES = 1 << 30  # of outputs and targets of all held-out samples; every rank holds them some times over
# Names of first arguments, in lower case, by which a function takes its arguments in the order of scikit-learn.
_TARGETS = (
    "y", "y_true", "true", "truth", "target", "targets", "label", "labels", "labels_true", "gt", "ground_truth",
    "actual", "expected", "reference", "references", "y_test", "label_ids",
)  # fmt: skip
_OUTPUTS = (
    "y_pred", "y_score", "y_prob", "pred", "preds", "prediction", "predictions", "predicted", "labels_pred",
    "output", "outputs", "logits", "scores",
)  # fmt: skip
# Fields of evaluation.json and metrics.jsonl.
_RESERVED = (
    "event", "loss", "epoch", "step", "samples", "time", "seconds", "lr", "gradient_norm", "per_class", "confusion",
    "checkpoint", "not_finite", "batch",
)  # fmt: skip
Scores = dict[str, float]


class Metric:
    """A callable of (outputs, targets), or an object with `compute`, as the evaluation uses it.

    A function gets the NumPy arrays of all held-out samples, in the data set's order, and returns a number; one with
    `names` returns {name: number}. An object with `sums(outputs, targets)` gets the tensors of one micro-batch, and
    returns {name: number or array} to be added up over all of them, in float64 or int64; `compute` makes its scores of
    the totals. `compute` without `sums` gets the evaluation's other numbers. A method `with_loss(loss)` returns the
    metric for that loss, or raises UsageError.
    """

    def __init__(self, function: Any, setting: str):
        self.function, self.setting = function, setting
        self.adds = callable(getattr(function, "sums", None))
        self.derives = callable(getattr(function, "compute", None)) and not self.adds
        named = getattr(function, "names", None)
        self.names: tuple[str, ...] = (_name(function),) if named is None else tuple(named)
        self._single = named is None
        self.tried = False  # do its sums add up?
        _refuse_kind(self, named)
        for name in self.names:
            if name in _RESERVED or name.startswith("ema_"):
                raise UsageError(
                    f"{setting} gives {name}, which is the name of another number: name it otherwise."
                )

    def scores(self, collected: Any) -> Scores:
        """The scores of totals, of {"outputs", "targets"}, or of other numbers. Raises UsageError, which names the
        metric, if it fails or gives no numbers."""
        with self.named_errors():
            if self.adds or self.derives:
                result = self.function.compute(dict(collected))
            else:
                result = self.function(collected["outputs"], collected["targets"])
        return self.checked(result)

    def checked(self, result: Any) -> Scores:
        """The function's result as scores. Raises UsageError if it is not a number for each name."""
        result = {self.names[0]: result} if self._single else result
        if not isinstance(result, Mapping) or {*result} != {*self.names}:
            names = ", ".join(self.names)
            raise UsageError(f"{self.setting} must return a number for each of {names}, not {result!r:.200}.")
        return {name: self._number(name, value) for name, value in result.items()}

    def _number(self, name: str, value: Any) -> float:
        try:
            array = np.asarray(value.numpy() if isinstance(value, paddle.Tensor) else value)
        except ValueError:  # lists of unlike lengths
            array = np.empty(0)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise UsageError(f"{self.setting}: {name} must be a number, not {value!r:.200}.")
        return float(array.reshape(()))

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Turns an error of the metric's function into a UsageError with the metric's setting and the line."""
        try:
            yield
        except PaddleDPError as error:
            raise UsageError(f"{self.setting}: {error}") from error
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}, line {last.lineno}"
            raise UsageError(f"{self.setting} failed: {type(error).__name__}: {error} ({where})") from error


def metrics_of(functions: Sequence[tuple[str, Any]], loss: Any) -> tuple[Metric, ...]:
    """The metrics of (setting, function) with this loss; a function is also a `paddle.metric.Metric`. Raises UsageError
    for two with one name, and for one that refuses the loss."""
    metrics, by_name = [], dict[str, str]()
    for setting, function in functions:
        try:
            if isinstance(function, paddle.metric.Metric):
                function = PaddleMetric(function)
            elif with_loss := getattr(function, "with_loss", None):
                function = with_loss(loss)
        except UsageError as error:
            raise UsageError(f"{setting}: {error}") from None
        metric = Metric(function, setting)
        for name in metric.names:
            if name in by_name:
                raise UsageError(f"{by_name[name]} and {setting} both give {name}: leave one of them out.")
            by_name[name] = setting
        metrics.append(metric)
    return tuple(metrics)


class Collected:
    """This rank's collected values for one metric, of `samples` held-out samples over all ranks.

    `failure`: why the metric failed on this rank; no more is collected then, and `scores` raises it on every rank.
    """

    def __init__(self, metric: Metric, samples: int):
        self.metric, self._samples, self.failure = metric, samples, ""
        self._sums: dict[str, np.ndarray] = {}
        self._structure: Any = None
        self._rows: list[list[np.ndarray]] = []

    def add(self, batch: Batch, micro_batch: MicroBatch, outputs: Any, targets: Any) -> None:
        """Adds a micro-batch, unless the metric fails, or the rows of all samples are too large."""
        if self.failure:
            return
        try:
            self._add(batch, micro_batch, outputs, targets)
        except UsageError as error:
            self.failure = str(error)

    def _add(self, batch: Batch, micro_batch: MicroBatch, outputs: Any, targets: Any) -> None:
        if self.metric.adds:
            if not self.metric.tried and micro_batch.samples > 1:
                self.metric.tried = True
                self._refuse_means(micro_batch.rows, outputs, targets)
            with self.metric.named_errors():
                _add(self._sums, _sums_of(self.metric.function, outputs, targets)[0])
            return
        pair, rows = {"outputs": outputs, "targets": targets}, micro_batch.samples
        arrays = [_array(leaf) for leaf in leaves(pair)]
        if any(
            array.ndim == 0 or len(array) != micro_batch.rows or array.dtype == object for array in arrays
        ):
            shapes = ", ".join(f"{array.dtype} {[*array.shape]}" for array in arrays)
            raise UsageError(
                f"{self.metric.setting} needs a row for each of {rows} samples; there are {shapes}."
            )
        self._refuse_large(sum(array.nbytes for array in arrays) / max(rows, 1) * self._samples)
        self._structure = structure_of(pair)
        places = micro_batch.places or range(micro_batch.first, micro_batch.first + rows)
        keys = np.asarray(places, "int64") + (batch.index << 32)
        self._rows.append([keys, *(array[:rows] for array in arrays)])

    def _refuse_means(self, rows: int, outputs: Any, targets: Any) -> None:
        """Raises UsageError if the sums of two halves do not add up: ranks and micro-batches have unequal shares. Tries
        a copy of the metric, which may remember, where every tensor has a row for each sample."""
        if any([*getattr(leaf, "shape", [])[:1]] != [rows] for leaf in leaves((outputs, targets))):
            return
        try:
            function = copy.deepcopy(self.metric.function)
            parts = (slice(None), slice(rows // 2), slice(rows // 2, None))
            cut = [[mapped(lambda x: x[part], side) for side in (outputs, targets)] for part in parts]  # noqa: B023
            (full, *halves), rounded = zip(*(_sums_of(function, *pair) for pair in cut), strict=True)
            addends = {name: np.stack([each[name] for each in halves]) for name in full}
        except Exception:  # noqa: BLE001 - so few samples may be none of its cases
            return
        limit = 1e-2 if any(rounded) or any(map(_is_16_bit, leaves(outputs))) else 1e-3
        for name, value in full.items():
            most = np.abs(addends[name]).sum(0).max(initial=0)
            if np.abs(value - addends[name].sum(0)).max(initial=0) > limit * most:
                raise UsageError(
                    f"{self.metric.setting}: {name} of its sums is {value.sum():g} for some samples together, and "
                    f"{addends[name].sum():g} for their halves, added up: other ranks would give another "
                    "score. Return sums over the samples, with .sum(), and divide them in compute(sums)."
                )

    def wrong_result(self) -> str:
        """Why a function's result for the rows until now is no score; "" if it is one, or if the function fails: so few
        samples may be none of its cases. An object is copied, since it may change and remember."""
        if self.metric.adds or self.metric.derives or not self._rows:
            return ""
        try:
            _, *arrays = (np.concatenate(column) for column in zip(*self._rows, strict=True))
            pair = unflatten(self._structure, arrays)
            result = copy.deepcopy(self.metric.function)(pair["outputs"], pair["targets"])
        except Exception:  # noqa: BLE001 - an evaluation reports it
            return ""
        names = {*self.metric.names}
        if result is None or (isinstance(result, Mapping) and {*result} < names):
            return ""  # for so few samples; an evaluation judges that of all
        try:
            self.metric.checked(result)
        except UsageError as error:
            return str(error)
        return ""

    def _refuse_large(self, total: float) -> None:
        if total > MAX_BYTES:
            raise UsageError(
                f"{self.metric.setting} needs the outputs and targets of all {self._samples} held-out samples on every "
                f"rank, {total / 2**30:.1f} GB, and at most {MAX_BYTES / 2**30:.0f} GB are gathered: write it as an "
                "object with sums(outputs, targets) and compute(sums) (docs/metrics.md)."
            )

    def gathered(self, mesh: Mesh) -> list[bytes]:
        """The content of every rank, in rank order; b"" of one that saw no outputs or failed. Collective."""
        if self.metric.derives:
            return []
        content = b""
        try:
            if self._sums:
                content = _packed(self._sums)
            elif self._rows:
                columns = enumerate(zip(*self._rows, strict=True))
                content = _packed({str(i): self._joined(column) for i, column in columns})
        except UsageError as error:
            self.failure = self.failure or str(error)
        return mesh.gather_bytes(content)

    def refuse_failed(self, mesh: Mesh) -> None:
        """Raises UsageError, on every rank, if the metric has failed on one. Collective."""
        if failure := next(filter(None, mesh.gather(self.failure)), ""):
            raise UsageError(failure)

    def scores(self, mesh: Mesh, gathered: list[bytes], numbers: Scores) -> Scores:
        """The scores of all ranks' samples, the same on every rank; `numbers`: the evaluation's others. Collective.

        Raises UsageError, on every rank, if the metric fails.
        """
        if self.metric.derives:
            return self.metric.scores(numbers)
        self.refuse_failed(mesh)
        answer: Any = None
        contents = [content for content in gathered if content]
        # The first rank that saw outputs computes for all.
        if contents and (self._sums or self._rows) and self._is_first(mesh, gathered):
            try:
                answer = {"scores": {name: repr(value) for name, value in self._computed(contents).items()}}
            except UsageError as error:
                answer = {"error": str(error)}
        answers = [each for each in mesh.gather(answer) if each]
        if not answers or "error" in answers[0]:
            raise UsageError(answers[0]["error"] if answers else f"{self.metric.setting} saw no sample.")
        return {name: float(value) for name, value in answers[0]["scores"].items()}

    def _is_first(self, mesh: Mesh, gathered: list[bytes]) -> bool:
        first = next(number for number, content in enumerate(gathered) if content)
        alive = [rank for rank in range(mesh.ranks) if rank not in mesh.lost]
        return alive[first] == mesh.rank

    def _computed(self, contents: list[bytes]) -> Scores:
        if self.metric.adds:
            totals: dict[str, np.ndarray] = {}
            with self.metric.named_errors():
                for content in contents:
                    _add(totals, _unpacked(content))
            return self.metric.scores(totals)
        columns = zip(*(_unpacked(content).values() for content in contents), strict=True)
        keys, *arrays = (self._joined(column) for column in columns)
        order = np.argsort(keys, kind="stable")
        return self.metric.scores(unflatten(self._structure, [array[order] for array in arrays]))

    def _joined(self, column: Sequence[np.ndarray]) -> np.ndarray:
        if len(shapes := {array.shape[1:] for array in column}) > 1:
            one, other = sorted(shapes)[:2]
            raise UsageError(
                f"{self.metric.setting} needs samples of one shape, not {[*one]} and {[*other]}: write it as "
                "an object with sums(outputs, targets) and compute(sums) (docs/metrics.md)."
            )
        return np.concatenate(column)


def _name(function: Any) -> str:
    name = getattr(function, "__name__", getattr(function, "func", type(function)))
    name = getattr(name, "__name__", name)
    return "metric" if name == "<lambda>" else str(name)


def _refuse_kind(metric: Metric, named: Any) -> None:
    """Raises UsageError for something that is no metric, and for a function that takes targets first, as
    scikit-learn's: its scores would be wrong."""
    function, setting = metric.function, metric.setting
    if isinstance(named, str) or not all(isinstance(name, str) for name in named or ()):
        raise UsageError(f"{setting}: names must be a tuple of names, not {named!r:.100}.")
    if metric.adds and not callable(getattr(function, "compute", None)):
        raise UsageError(f"{setting} has sums, and no compute(sums) that makes its scores of them.")
    called: Callable[..., Any] = function.compute if metric.adds or metric.derives else function
    if not callable(called) or isinstance(function, type):
        raise UsageError(
            f"{setting} is no metric: write a function of (outputs, targets), or an object (docs/metrics.md)."
        )
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return
    arguments = 1 if metric.adds or metric.derives else 2
    try:
        signature.bind(*range(arguments))
    except TypeError as error:
        raise UsageError(
            f"{setting} is called with {arguments} arguments, and does not take them: {error}."
        ) from None
    first, second = ([*map(str.lower, signature.parameters), "", ""])[:2]
    if arguments == 2 and first not in _OUTPUTS and (first in _TARGETS or second in _OUTPUTS):
        raise UsageError(
            f"{setting} takes {first} first, and a metric is called with (outputs, targets): write a function, such as "
            f"def score(outputs, targets): return {metric.names[0]}(targets, outputs.argmax(-1))."
        )


def _copied(tensor: Any) -> Any:
    """A copy that a metric may change."""
    return tensor.clone() if isinstance(tensor, paddle.Tensor) else tensor


def _sums_of(function: Any, outputs: Any, targets: Any) -> tuple[dict[str, np.ndarray], bool]:
    """A metric's sums in 64 bits, and whether they were rounded to 16 before."""
    sums = dict(function.sums(mapped(_copied, outputs), mapped(_copied, targets)))
    return {name: _wide(_array(value)) for name, value in sums.items()}, any(map(_is_16_bit, sums.values()))


def _is_16_bit(value: Any) -> bool:
    return getattr(value, "dtype", None) in (paddle.bfloat16, paddle.float16, np.float16)


def _array(value: Any) -> np.ndarray:
    """A tensor or number as an array, 16-bit floats as float32: NumPy has no bfloat16."""
    if isinstance(value, paddle.Tensor):
        value = value.astype("float32") if _is_16_bit(value) else value
        return value.numpy()
    return np.asarray(value)


def _wide(array: np.ndarray) -> np.ndarray:
    """A copy in int64 or float64, so that no sum overflows or stops growing."""
    return array.astype("int64" if array.dtype.kind in "biu" else "float64")


def _add(totals: dict[str, np.ndarray], sums: Mapping[str, np.ndarray]) -> None:
    """Adds `sums`; the totals of one rank, too, are new arrays, which a metric may change, and numbers.

    Raises UsageError for a sum of another shape than before: NumPy would repeat its elements."""
    for name, value in sums.items():
        total = totals.get(name)
        if total is not None and total.shape != value.shape:
            raise UsageError(
                f"its sum '{name}' is {[*total.shape]} for some samples and {[*value.shape]} for others. Give it one "
                "shape, such as np.bincount(targets, minlength=classes)."
            )
        totals[name] = (0 if total is None else total) + value


def _packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The length of a header, the header, and the bytes of each array."""
    header = json.dumps([[name, array.dtype.str, array.shape] for name, array in arrays.items()]).encode()
    return b"".join([len(header).to_bytes(8, "big"), header, *(array.tobytes() for array in arrays.values())])


def _unpacked(content: bytes) -> dict[str, np.ndarray]:
    """The arrays, which read `content` and cannot be written."""
    at = 8 + int.from_bytes(content[:8], "big")
    arrays = {}
    for name, dtype, shape in json.loads(content[8:at]):
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(content, dtype, count, at).reshape(shape)
        at += arrays[name].nbytes
    return arrays
