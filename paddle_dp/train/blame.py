"""Explains the errors that end a training: the sample that causes a number that is not finite, or a bad target, since
when numbers are bad, the checkpoint to go back to, and the phase for which a device's memory was too small.

Before the training ends, the samples just read are read again; for a skipped update, its batch is searched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from threading import Thread
from typing import Any, NoReturn

import numpy as np
import paddle

from paddle_dp import checkpoint as checkpoints
from paddle_dp.batch import Batch, leaves, named_leaves
from paddle_dp.core.memory_error import unallocated
from paddle_dp.data import Loader
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import name, read_samples
from paddle_dp.errors import LossError, NotFiniteError, OutOfMemoryError, PaddleDPError, TargetError
from paddle_dp.learner.learner import Learner
from paddle_dp.learner.memory import size, states
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.text import amount, numbered
from paddle_dp.train.evaluation import Evaluation
from paddle_dp.train.meter import peak_memory
from paddle_dp.train.run import Run

PATIENCE = 20.0  # seconds; less than gloo's time limit of 30 s, or the ranks that wait would fail first
_BFLOAT16 = "bfloat16"
OOM_MESSAGE = "Out of memory error"


def bad_sample(loader: Loader, steps: Iterable[int], mesh: Mesh, data_name: str = "training") -> str:
    """A sentence about the first sample, read in one of `steps` (from 1), that is not finite; "" without one.

    Every rank reads its samples again, with the same random numbers, for `PATIENCE` seconds at most. Collective. Never
    raises, since an error is being reported.
    """
    bad_rows: list[dict[str, Any]] = []

    def search() -> None:
        with suppress(Exception):  # an error here must not hide the reported one
            bad_rows.extend(_first_bad(loader, steps))

    reader = Thread(target=search, daemon=True)  # a data set that hangs must not hold the report back
    reader.start()
    reader.join(PATIENCE + 5.0)
    mesh.wait("samples looked at")
    rank_rows = mesh.gather(bad_rows[0] if bad_rows else None)
    first = min((row for row in rank_rows if row), key=lambda row: row["step"], default=None)
    if first is None:
        return ""
    where = f"in step {first['step']}" if data_name == "training" else "by the evaluation"
    sample = first["name"][:1].upper() + first["name"][1:]
    bad = f"{sample} of the {data_name} data, read {where}, has {first['part']} that are not finite"
    return f"{bad}: mend it, or leave it out."


def in_batch(loader: Loader, batch: Batch, mesh: Mesh) -> str:
    """Names the first bad sample of the global batch: "sample 17 has inputs that are not finite"; "" without one.
    Collective.

    Nothing is read again: the training continues, and the data set may draw random numbers.
    """
    rows = mesh.gather(_bad_row(batch))
    first = min((row for row in rows if row), key=lambda row: row["place"], default=None)
    if first is None:
        return ""
    samples = loader.sampler.global_batch(batch.epoch, batch.index)
    suspects = [name(loader.dataset, int(samples[first["place"]]))]
    if loader.sampler.with_previous:  # the row is a mixture with the one before
        suspects.append(name(loader.dataset, int(samples[first["place"] - 1])))
    return f"{' or '.join(suspects)} has {first['part']} that are not finite"


def _bad_row(batch: Batch) -> dict[str, Any] | None:
    """This rank's first bad sample, by its position in the global batch; None without one."""
    for micro_batch in batch.micro_batches:
        for array_name, tensor in _named_arrays(micro_batch.inputs, micro_batch.targets):
            if not tensor.is_floating_point() or micro_batch.is_dummy:
                continue
            rows = tensor[: micro_batch.samples]
            row = _first_row((rows.astype("float32") if rows.dtype == paddle.bfloat16 else rows).numpy())
            if row is not None:
                return {"place": micro_batch.first + row, "part": array_name}
    return None


def bad_target(
    loader: Loader, epoch: int, batch: int, error: TargetError, data_name: str = "training"
) -> LossError:
    """The error with the name of its sample, which this rank read in global batch `batch`."""
    more = int(loader.sampler.with_previous)  # the target may be of the sample that was mixed in
    rows = [
        index
        for indices, count in loader.sampler.reads(epoch, batch)
        if error.row < count
        for index in indices[error.row : error.row + more + 1]
    ]
    for index in map(int, rows):
        with restoring_globals():
            if loader.reads is None:
                return LossError(
                    f"{_describe_rows(rows)} of the {data_name} data, which rank 0 has read: {error}"
                )
            _, targets = read_samples(loader.dataset, np.array([index]), loader.sampler.seed, epoch)
        if any((np.asarray(leaf) == error.value).any() for leaf in leaves(targets)):
            return LossError(f"{name(loader.dataset, index)} of the {data_name} data: {error}")
    return LossError(f"{data_name} data: {error}")


def _describe_rows(rows: list[int]) -> str:
    phrase = f"sample {rows[0]}"
    return phrase if len(rows) == 1 else f"one of the samples {', '.join(map(str, rows[:8]))}"


def _first_bad(loader: Loader, steps: Iterable[int]) -> list[dict[str, Any]]:
    """This rank's first bad sample; empty without one."""
    end = time.monotonic() + PATIENCE
    for step, indices in _read_in(loader, steps):
        if time.monotonic() > end:
            return []
        with restoring_globals():
            epoch, _ = loader.sampler.position(step - 1)
            inputs, targets = read_samples(loader.dataset, indices, loader.sampler.seed, epoch)
        for array_name, array in _named_arrays(inputs, targets):
            row = _first_row(array)
            if row is not None:
                return [{"step": step, "name": name(loader.dataset, int(indices[row])), "part": array_name}]
    return []


def _named_arrays(inputs: Any, targets: Any) -> Iterator[tuple[str, Any]]:
    """Yields ("inputs", array), or ("inputs (image)", array) for each of several."""
    for array_name, values in (("inputs", inputs), ("targets", targets)):
        for where, leaf in named_leaves(values):
            yield f"{array_name} ({where})" if where else array_name, leaf


def _read_in(loader: Loader, steps: Iterable[int]) -> Iterator[tuple[int, Any]]:
    if loader.reads is None:
        return
    for step in steps:
        epoch, batch = loader.sampler.position(step - 1)
        for indices in loader.reads.local_batch(epoch, batch):
            if len(indices):
                yield step, indices


def _first_row(array: Any) -> int | None:
    """The index of the first row of [n, …] that is not finite; None without one."""
    array = np.asarray(array)
    if array.dtype.name == _BFLOAT16:
        array = array.astype("float32")
    if array.dtype.kind not in "fc":
        return None
    bad = ~np.isfinite(array.reshape(len(array), -1)).all(1)
    return int(bad.argmax()) if bad.any() else None


class NumericsCheck:
    """Keeps the last `step` after which weights and states were good (None: not checked yet), and the last one whose
    loss was `finite` (0: none was read). Explains errors after them.

    Its methods are collective: all ranks see the same numbers and raise the same error.
    """

    def __init__(self, run: Run, loader: Loader):
        self.run, self.loader, self.mesh = run, loader, run.mesh
        self.step: int | None = None
        self.finite = 0

    def explained(self, error: PaddleDPError, step: int, advice: str = "") -> PaddleDPError:
        """The same error, raised after `step`, with the bad sample if there is one, the last good step, the `advice`,
        and the checkpoint to go back to."""
        sentences = [str(error)]
        if isinstance(error, NotFiniteError):
            self.loader.close()  # or its workers would read on meanwhile
            # A finite loss is no reason to begin later: Paddle's ReLU makes 0 of a NaN on a CPU.
            first = step if self.step is None or self.step >= step else self.step + 1
            sentences.append(bad_sample(self.loader, range(max(first, 1), step + 1), self.mesh))
        if (self.step or 0) < self.finite < step:
            sentences.append(f"The loss was finite at step {self.finite}, when it was last read.")
        elif self.step is not None and self.step < step:
            sentences.append(f"All was good after step {self.step}, when it was last looked at.")
        return type(error)(" ".join(filter(None, [*sentences, advice, self.last_good()])))

    def last_good(self) -> str:
        """A sentence on the checkpoint to go back to, as rank 0 sees the folder."""
        folder, sentence = self.run.folder / "checkpoints", ""
        if self.mesh.is_main:
            resume = "--resume" if self.run.recipe is not None else "resume=True"
            if good := checkpoints.newest_good(folder):
                sentence = f"The newest checkpoint that was found good is {good}: {resume} continues from it."
            elif checkpoints.checkpoints(folder):
                sentence = f"No checkpoint in {folder} was found good when it was saved."
            else:
                sentence = f"There is no checkpoint in {folder} to go back to."
        # Rank 0 reads all its bytes, which may take longer than a collective waits.
        self.mesh.wait("newest good checkpoint")
        return str(self.mesh.gather(sentence)[0])

    def refuse_loss(self, loss: float, step: int, local_loss: float | None = None) -> NoReturn:
        """Raises NotFiniteError for a loss that is NaN or infinite; the message names the ranks with a bad
        `local_loss`, their share of it."""
        bad = [
            rank for rank, share in enumerate(self.mesh.gather(local_loss)) if not math.isfinite(share or 0.0)
        ]
        where = f"step {step}{_on(bad) if self.mesh.ranks > 1 else ''}"
        layer = " guard: {non_finite: stop} looks before each update, and names the layer."
        self._refuse(f"the loss is {loss} at {where}", step, layer)

    def refuse_gradients(self, norm: float, faulty: dict[str, str], step: int) -> NoReturn:
        """Raises NotFiniteError for a gradient norm that is NaN or infinite. The message names the first of the
        `faulty` gradients (name → its bad values on this rank), and its rank."""
        first = self.first_gradient(faulty)
        where = f": that{first}" if first else ""
        self._refuse(f"the gradient norm is {norm} at step {step}{where}", step)

    def first_gradient(self, faulty: dict[str, str]) -> str:
        """Describes the first of all ranks' faulty gradients: " of 'fc1.weight' has 3 NaN of 100 on ranks 0, 1"; all
        ranks that have summed it have it. "" without one."""
        gathered = self.mesh.gather(faulty)
        first = next((row for rows in gathered for row in rows.items()), None)
        if first is None:
            return ""
        return f" of '{first[0]}' has {first[1]}{_on([r for r, rows in enumerate(gathered) if first[0] in rows])}"

    def _refuse(self, problem: str, step: int, more: str = "") -> NoReturn:
        helps = "A lower schedule.learning_rate, a longer schedule.warmup or optimizer.clip usually helps."
        error = NotFiniteError(f"{problem}: training cannot go on from here.")
        raise self.explained(error, step, f"{helps}{more}")

    def refuse_evaluation(self, evaluation: Evaluation, when: str) -> NoReturn:
        """Raises NotFiniteError for an evaluation with NaN or infinite numbers, if all weights are finite; UsageError
        if a metric is to blame."""
        evaluation.refuse_metric()
        loader, why = self.run.test_loader, ""
        if loader is not None:
            why = bad_sample(loader, range(1, loader.batches + 1), self.mesh, "held-out")
        raise NotFiniteError(
            f"{when} gives {evaluation.bad_numbers}, though all weights are finite. "
            f"{why or 'Look at the loss, its scores and the held-out data.'} {self.last_good()}"
            + f" {evaluation.failure}".rstrip()
        )


def _on(ranks: list[int]) -> str:
    """ " on ranks 0, 1"; "" for none."""
    return f" on {numbered('rank', ranks)}" if ranks else ""


def out_of_memory(error: BaseException, learner: Learner, mesh: Mesh, step: int) -> OutOfMemoryError:
    """The `core.memory_error` of this rank's update `step`, with the size, the phase, and the bytes that the rank
    held."""
    parameters = [parameter for _, parameter in learner.placed.named_parameters()]
    sizes = {
        "parameters": size(parameters),
        "gradients": size(parameter.grad for parameter in parameters if not parameter.stop_gradient),
        "optimizer states": size(states(learner.optimizer)),
    }
    known = ", ".join(f"{name} {amount(bytes_)}" for name, bytes_ in sizes.items())
    peak = peak_memory(mesh.device)
    rest = max(peak - sum(sizes.values()), 0)
    return OutOfMemoryError(
        f"out of memory: {unallocated(error) or 'memory'} could not be allocated in {heartbeat.phase} of step {step}. "
        f"Rank {mesh.rank} held {known} on {mesh.device}; at its peak, {amount(peak)}, the other {amount(rest)} were "
        f"activations, buffers and exchanged tensors.{_oom_sentence(error)}\n"
        "To reduce it: a larger train.micro_batches, strategy.recompute, strategy.sharding over more ranks "
        "(sharding_stage 3 keeps parameters with their owners, too), strategy.offload. "
        "`paddle-dp check RECIPE --ranks N` works it out."
    )


def _oom_sentence(error: BaseException) -> str:
    """ " Paddle reports: …": the sentence with the numbers of a device; "" on a CPU."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line[line.index(OOM_MESSAGE) :] for line in lines if OOM_MESSAGE in line), "")
    return said and f" Paddle reports: {said}"
