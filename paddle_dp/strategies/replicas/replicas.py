"""Copies of a model in one process, which compute parts of each micro-batch: scatter, replicate, gather, reduce.

Each copy may have a separate device. No backward runs from one device into another, because Paddle has no operation for
it (`Tensor.to` passes no gradient on, 3.3.1): the loss's backward ends at the gathered outputs, and each copy's begins
with their gradients, when all copies have them.

Inputs are scattered, weights replicated, outputs gathered and gradients summed on the first copy as by torch's
nn.DataParallel (and Paddle's ParallelExecutor before 2.0). The loss gets the gathered outputs, so any loss is over the
whole micro-batch, even one that compares samples.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import nn

from paddle_dp.batch import leaves, mapped
from paddle_dp.core.batch_norm import LocalNorms, statistics
from paddle_dp.core.blocks import elements_of
from paddle_dp.core.consistency import Digest, digests
from paddle_dp.core.dropout import number_blocks
from paddle_dp.core.dropout.scope import within_samples
from paddle_dp.core.loss import Count
from paddle_dp.errors import UsageError
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.learner.learner_checks import LearnerCheck
from paddle_dp.learner.update import UpdateMode, WeightSync
from paddle_dp.mesh.device import device_from_name, moved, name_of, on
from paddle_dp.text import few, plural

_NORMS = (
    "{} over one copy's samples ({}): a process without copies (strategy.use=single) takes those of the whole "
    "batch"
)
_BUFFER = (
    "buffer {} is updated by forward from each copy's own samples, and the first copy's counts: a process without "
    "copies (strategy.use=single) takes all"
)


def copied(model: nn.Layer, devices: Sequence[str]) -> list[nn.Layer]:
    """Returns a copy of an unplaced model on each of the devices. Raises UsageError if it cannot be copied."""
    try:
        replicas = [_copied(model, device) for device in devices]
    except Exception as error:
        raise UsageError(
            f"strategy replicas: {type(model).__name__} cannot be copied ({type(error).__name__}: {error}): choose "
            "strategy.use=data_parallel, in which each process builds its own."
        ) from error
    parameter_names = [name for name, _ in model.named_parameters()]
    if any([name for name, _ in each.named_parameters()] != parameter_names for each in replicas):
        raise UsageError(
            f"strategy replicas: a copy of {type(model).__name__} has other parameters than itself: choose "
            "strategy.use=data_parallel, in which each process builds its own."
        )
    return replicas


def _copied(model: nn.Layer, device: str) -> nn.Layer:
    replica = copy.deepcopy(model)
    tensors = [tensor for tensor in (*replica.parameters(), *replica.buffers()) if tensor._is_initialized()]
    if any(name_of(tensor.place) != device for tensor in tensors):
        replica.to(device=device_from_name(device))
    return replica


class Replicated(nn.Layer):
    """Calls every replica, on its device, with its part of the samples; returns the outputs of one call, on the first
    device.

    The host launches on each device in turn, and waits for none before all have work.
    """

    def __init__(self, replicas: Sequence[nn.Layer], devices: Sequence[str]):
        super().__init__()
        self._replicas = list(replicas)  # in a list: sublayers would be listed twice
        self._devices = devices
        self.ran = 1  # replicas that had samples in the last call
        # By replica: outputs, as gathered.
        self._gathered: list[list[tuple[paddle.Tensor, paddle.Tensor]]] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raises UsageError for outputs that are not [samples, …]."""
        rows = int(leaves((inputs, named))[0].shape[0])
        count = min(len(self._replicas), rows)
        shares = [slice(index * rows // count, (index + 1) * rows // count) for index in range(count)]
        scattered = [
            self._scattered((inputs, named), share, self._devices[index])
            for index, share in enumerate(shares)
        ]
        outputs = []
        for index, (positional, named_inputs) in enumerate(scattered):
            replica, device, share = self._replicas[index], self._devices[index], shares[index]
            with within_samples(share.start, share.stop), on(device):
                outputs.append(replica(*positional, **named_inputs))
        self.ran = max(self.ran, count)
        if len(set(self._devices)) > 1:
            outputs = self._gather(outputs)
        sizes = [share.stop - share.start for share in shares]
        return paddle.utils.map_structure(lambda *chunks: _together(chunks, sizes), *outputs)

    @staticmethod
    def _scattered(nesting: Any, share: slice, device: str) -> Any:
        return mapped(lambda tensor: moved(tensor[share], device), nesting)

    def _gather(self, outputs: Sequence[Any]) -> list[Any]:
        """The outputs on the first device, as leaves; `backward` continues from these into the replicas."""
        self._gathered = []

        def arrived(output: Any) -> Any:
            if not isinstance(output, paddle.Tensor):
                return output  # `_together` refuses it
            there = moved(output.detach(), self._devices[0])
            if paddle.is_grad_enabled() and not output.stop_gradient:
                there.stop_gradient = False
                self._gathered[-1].append((output, there))
            return there

        gathered = []
        for output in outputs:
            self._gathered.append([])
            gathered.append(paddle.utils.map_structure(arrived, output))
        return gathered

    def backward(self) -> None:
        """Runs the replicas' backwards after the loss's, if the replicas have separate devices."""
        handed = [
            [(output, moved(there.grad, device)) for output, there in pairs if there.grad is not None]
            for device, pairs in zip(self._devices, self._gathered, strict=False)
        ]
        self._gathered = []
        for device, pairs in zip(self._devices, handed, strict=False):
            if pairs:
                with on(device):
                    paddle.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def _together(chunks: Sequence[Any], sizes: Sequence[int]) -> Any:
    for chunk, size in zip(chunks, sizes, strict=True):
        if not isinstance(chunk, paddle.Tensor) or not chunk.ndim or chunk.shape[0] != size:
            got = list(chunk.shape) if isinstance(chunk, paddle.Tensor) else type(chunk).__name__
            raise UsageError(
                f"strategy replicas puts the outputs of its copies together along the samples, and forward gave {got} "
                f"for {size} samples: choose strategy.use=data_parallel, in which each process has its own loss."
            )
    return paddle.concat(list(chunks)) if len(chunks) > 1 else chunks[0]


class Copies:
    """The copies of a model, on `devices[1:]`; the model itself computes on `devices[0]`."""

    def __init__(self, model: nn.Layer, replicas: Sequence[nn.Layer], devices: Sequence[str]):
        self.model, self.replicas, self.devices = model, list(replicas), list(devices)
        self.replicated = Replicated([model, *replicas], devices)
        self._parameters = [
            list(zip(model.parameters(), replica.parameters(), strict=True)) for replica in replicas
        ]
        layers = model.sublayers(include_self=True)
        self._layers = [
            list(zip(layers, replica.sublayers(include_self=True), strict=True)) for replica in replicas
        ]
        for replica in replicas:
            number_blocks(elements_of(replica))
        self.differing_buffers: list[str] | None = None  # that copies changed; None before an update

    @paddle.no_grad()
    def replicate(self) -> None:
        """Copies the model's weights, buffers, frozen flags and layer settings, which a callback may have changed."""
        twins = zip(self.replicas, self.devices[1:], self._parameters, self._layers, strict=True)
        for replica, device, pairs, layers in twins:
            buffers = zip(self.model.buffers(), replica.buffers(), strict=True)
            with on(device):
                for original, twin in (*pairs, *buffers):
                    # `_dropout_state` of Paddle's LSTM and GRU has no memory on a CPU.
                    if original._is_initialized():
                        twin.copy_(moved(original, name_of(twin.place)), False)
            for original, twin in pairs:
                twin.stop_gradient = original.stop_gradient
                twin.clear_gradient(False)  # of an update that failed
            for layer, twin_layer in layers:
                _set_alike(layer, twin_layer)

    def reduce(self) -> None:
        """After the backwards of a batch, averages running statistics, and sums the copies' gradients on the model."""
        self._compare_buffers()
        self._average_statistics()
        self._add_up()
        self.replicated.ran = 1

    @paddle.no_grad()
    def _add_up(self) -> None:
        """Adds the copies' gradients up on the model, in their order."""
        for pairs in self._parameters:
            for original, twin in pairs:
                if twin.grad is None:
                    continue
                grad = moved(twin.grad, self.devices[0])
                if original.grad is None:
                    original.grad = grad.clone() if grad is twin.grad else grad
                else:
                    original.grad.add_(grad)
                twin.clear_gradient(False)

    @property
    def _used(self) -> list[nn.Layer]:
        """The copies that had samples in this batch."""
        return self.replicas[: self.replicated.ran - 1]

    @paddle.no_grad()
    def _average_statistics(self) -> None:
        copy_statistics = [statistics(replica) for replica in self._used]
        if not copy_statistics:
            return
        for name, original in statistics(self.model).items():
            values = (moved(tensors[name], self.devices[0]).astype("float64") for tensors in copy_statistics)
            total = sum(values, original.astype("float64"))
            original.copy_((total / (len(copy_statistics) + 1)).astype(original.dtype), False)

    def _compare_buffers(self) -> None:
        """Finds, once, the buffers other than statistics that the copies have updated differently from the model."""
        if self.differing_buffers is not None:
            return
        first, *copies = (self._digests(replica) for replica in (self.model, *self._used))
        self.differing_buffers = [name for copied in copies for name in first if copied[name] != first[name]]

    def _digests(self, replica: nn.Layer) -> dict[str, Digest]:
        buffers = _plain_buffers(replica)
        on_first = digests(moved(buffer, self.devices[0]) for buffer in buffers.values())
        return dict(zip(buffers, on_first, strict=True))


class CopiesExchange(GradientExchange):
    """The reduction of the gradients of copies in one process."""

    missing = "raise"

    def __init__(self, copies: Copies):
        self._copies = copies

    @contextmanager
    def backward(self, last: bool, counted: Count = 0) -> Iterator[None]:
        yield
        self._copies.replicated.backward()

    def finish(self) -> list[int]:
        self._copies.reduce()
        return []

    def discard(self) -> None:
        self._copies.reduce()


class CopiedWeights(WeightSync):
    """Copies receive the model's weights before each update. Only the model is updated, evaluated and saved."""

    def __init__(self, mode: UpdateMode, copies: Copies):
        super().__init__(mode)
        self._copies = copies

    def begin_update(self, number: int) -> UpdateMode:
        self._copies.replicate()
        return self.mode


class CopiesCheck(LearnerCheck):
    """Names BatchNorms and buffers that each copy computes from its samples only."""

    def __init__(self, copies: Copies, local_norms: LocalNorms):
        self._copies, self._local_norms = copies, local_norms

    def differences(self) -> Iterator[str]:
        if names := self._local_norms.names():
            layers = plural(len(names), "BatchNorm layer normalizes", "BatchNorm layers normalize")
            yield _NORMS.format(layers, few(names, 1))
        yield from map(_BUFFER.format, dict.fromkeys(self._copies.differing_buffers or ()))


def _set_alike(layer: nn.Layer, twin: nn.Layer) -> None:
    """Copies a layer's mode and settings (a dropout's rate, a temperature, a list of widths) to its twin."""
    twin_settings = vars(twin)
    for name, value in vars(layer).items():
        if _is_setting(value) and (name not in twin_settings or twin_settings[name] != value):
            twin_settings[name] = copy.deepcopy(value)


def _is_setting(value: Any) -> bool:
    """Whether `value` is a plain number or text, or a list, tuple or dict of such."""
    if isinstance(value, list | tuple):
        return all(map(_is_setting, value))
    if isinstance(value, dict):
        return all(map(_is_setting, value)) and all(map(_is_setting, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


def _plain_buffers(model: nn.Layer) -> dict[str, paddle.Tensor]:
    """The buffers without BatchNorm's statistics, by name."""
    running = {id(tensor) for tensor in statistics(model).values()}
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if id(buffer) not in running and buffer._is_initialized()
    }
