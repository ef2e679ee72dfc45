"""Records updates: weights, each rank's local gradient, and the final gradient that the optimizer gets.

A hook on a parameter gets its gradient before DataParallel's reducer does (Paddle 3.3.1, GradNodeAccumulation: gradient
hooks, then accumulation, then reduce hooks), so the local gradient is known without an extra backward. The final
gradient is read in `Optimizer._apply_optimize`, which all optimizers call, before the optimizer clips it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle.amp import AmpScaler
from paddle.distributed import fleet
from paddle.nn import BatchNorm, Layer, SyncBatchNorm
from paddle.nn.layer.norm import _BatchNormBase
from paddle.optimizer import Optimizer

from paddle_dp.audit import events
from paddle_dp.audit.hooks import arrays, generators
from paddle_dp.audit.hooks.source_line import here
from paddle_dp.audit.hooks.watch import ScriptMonitor, wrap

MAX_END_NUMBERS = 4096  # recorded elements of each parameter at the end
MEANS = 4  # recorded running means of each BatchNorm layer
Original = Callable[..., Any]


class Updates:
    """This rank's optimizers, their updates, and the local gradients since the last one."""

    def __init__(self, watch: ScriptMonitor, on_step: Callable[[list[Any]], None] | None = None):
        self.watch, self.on_step = watch, on_step
        self.optimizers: list[Any] = []
        self.local_gradients: dict[str, np.ndarray] = {}
        self.hooked: set[int] = set()  # ids of the parameters with a hook
        self.norms: list[Any] = []
        self.every, self.scale = 1, 1.0
        self.stepping: Any = None  # the recorded optimizer that is in step()
        self.depth = 0

    def install(self) -> None:
        for kind in (Optimizer, *_subclasses(Optimizer)):
            if "__init__" in vars(kind):  # AdamW's does not call Optimizer's (Paddle 3.3.1)
                wrap(kind, "__init__", partial(self._created, kind))
            for name in {"step", "minimize"} & vars(kind).keys():
                wrap(kind, name, self._stepped)
        wrap(Optimizer, "_apply_optimize", self._applied)
        wrap(paddle.DataParallel, "__init__", self._wrapped)
        wrap(AmpScaler, "_unscale", self._unscaled)

    def _created(self, kind: Any, init: Original, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        init(optimizer, *args, **kwargs)
        if type(optimizer) is kind or "_param_groups" in vars(optimizer):
            self.add(optimizer)

    def _stepped(self, call: Original, *args: Any, **kwargs: Any) -> Any:
        """Counts one call of step() as one update, although it updates parameter groups one after the other."""
        self.depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            self.depth -= 1
            self.stepping = self.stepping if self.depth else None

    def _applied(self, apply: Original, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if paddle.in_dynamic_mode() and self.stepping is not optimizer:
            self.step(optimizer)
            self.stepping = optimizer if self.depth else None
        return None if self.on_step is not None else apply(optimizer, *args, **kwargs)

    def _wrapped(self, init: Original, wrapper: Any, layers: Layer, *args: Any, **kwargs: Any) -> None:
        before = arrays.digests(layers.parameters())
        init(wrapper, layers, *args, **kwargs)
        self.watch.journal.write(events.Wrapped(before=before, where=here()))

    def _unscaled(self, unscale: Original, scaler: Any, optimizer: Any) -> Any:
        if scaler._enable:
            self.scale = float(scaler._scale.numpy().reshape(-1)[0])
        return unscale(scaler, optimizer)

    def add(self, optimizer: Any) -> None:
        """Registers an optimizer, once, and hooks its parameters' gradients."""
        if any(optimizer is known for known in self.optimizers):
            return
        parameters = parameters_of(optimizer)
        self.every = max(self.every, arrays.stride(parameters))
        self.optimizers.append(optimizer)
        for parameter in parameters:
            if id(parameter) not in self.hooked and not parameter.stop_gradient:
                self.hooked.add(id(parameter))
                parameter.register_hook(self._gradient_hook(parameter))
        created = events.OptimizerCreated(parameters=arrays.digests(parameters), where=here())
        self.watch.journal.write(created)

    def _gradient_hook(self, parameter: Any) -> Callable[[Any], None]:
        """A hook that accumulates local gradients as Paddle does, between calls of clear_grad()."""
        name = parameter.name

        def accumulate(gradient: Any) -> None:
            self.watch.gradients += 1
            if gradient.is_dense():
                local, before = arrays.numbers(gradient, self.every), gradient_of(parameter)
                if name in self.local_gradients and before is not None and bool(paddle.any(before != 0)):
                    local = self.local_gradients[name] + local
                self.local_gradients[name] = local

        return accumulate

    def step(self, optimizer: Any) -> None:
        """Records the coming update; after enough updates, ends the script instead."""
        watch = self.watch
        watch.check()
        if watch.done >= watch.limit:
            watch.stop()
        self.add(optimizer)
        number = next(n for n, known in enumerate(self.optimizers) if known is optimizer)
        parameters = [each for each in parameters_of(optimizer) if not each.stop_gradient]
        if watch.done == 0:
            self.norms = local_norms()
            watch.journal.write(batch_norm_layers(self.norms))
            if degrees := split_degrees():
                watch.journal.write(events.ModelSplit(degrees=degrees))
        if self.on_step is not None:
            self.on_step(parameters)
            return
        watch.done += 1
        name = self._record(parameters) if watch.record_next else ""
        watch.record_next = False
        drew = bool(watch.window) and watch.states_at_window != generators.states()["paddle"]
        watch.journal.write(events.Stepped(
            optimizer=number, digests=arrays.digests(parameters),
            missing=tuple(each.name for each in parameters if gradient_of(each) is None), drew=drew,
            batches=tuple((batch.loader, batch.number, batch.index) for batch in watch.window),
            scale=self.scale, arrays=name, where=here(),
        ))  # fmt: skip
        watch.window.clear()

    def _record(self, parameters: list[Any]) -> str:
        """Writes this update's weights, local and final gradients, and batches; returns the files' name."""
        watch = self.watch
        name = f"rank-{watch.rank}.step-{watch.done}"
        saved = {f"own/{key}": value for key, value in self.local_gradients.items()}
        for each in parameters:
            gradient = gradient_of(each)
            if gradient is not None and gradient.is_dense():
                saved[f"final/{each.name}"] = arrays.numbers(gradient, self.every)
            saved[f"weight/{each.name}"] = arrays.numbers(each, self.every)
        np.savez(watch.folder / f"{name}.npz", **saved)  # type: ignore[arg-type]
        if watch.rank == 0:
            full = {key: arrays.numbers(each) for key, each in arrays.live_parameters().items()}
            np.savez(watch.folder / f"{name}.whole.npz", **full)  # type: ignore[arg-type]
        if watch.window:
            arrays.write_batches(watch.folder, f"{name}.batches", [batch.data for batch in watch.window])
        return name

    def finish(self) -> None:
        """Records the weights after the last update, and the running means of local BatchNorm layers."""
        if not self.watch.done:
            return
        parameters = [p for known in self.optimizers for p in parameters_of(known) if not p.stop_gradient]
        name = f"rank-{self.watch.rank}.left"
        first_numbers = {each.name: arrays.numbers(each)[:MAX_END_NUMBERS] for each in parameters}
        np.savez(self.watch.folder / f"{name}.npz", **first_numbers)  # type: ignore[arg-type]
        self.watch.journal.write(events.FinalWeights(digests=arrays.digests(parameters), arrays=name))
        means = {layer.full_name(): layer._mean for layer in self.norms}
        first_means = {key: tuple(map(float, arrays.numbers(mean)[:MEANS])) for key, mean in means.items()}
        self.watch.journal.write(events.RunningMeans(means=first_means))


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    """All subclasses of a class, at any depth."""
    return [each for child in kind.__subclasses__() for each in (child, *_subclasses(child))]


def parameters_of(optimizer: Any) -> list[Any]:
    """An optimizer's parameters, with and without groups, each once."""
    groups = optimizer._param_groups or []
    flat = [each for group in groups for each in (group["params"] if isinstance(group, dict) else [group])]
    return list({id(each): each for each in flat}.values())


def gradient_of(parameter: Any) -> Any:
    """The accumulated gradient of a parameter; None without one."""
    # Paddle keeps the float32 gradient of a low-precision weight in main_grad, if it has one.
    main = getattr(parameter, "main_grad", None)
    return main if main is not None else parameter._grad_ivar()


def local_norms() -> list[Any]:
    """The unfrozen BatchNorm layers that normalise over this rank's samples alone."""
    layers = [each for each in gc.get_objects() if isinstance(each, _BatchNormBase | BatchNorm)]
    return [each for each in layers if not isinstance(each, SyncBatchNorm) and not _frozen(each)]


def _frozen(layer: Any) -> bool:
    return not layer.training or layer._use_global_stats is True


def batch_norm_layers(layers: list[Any]) -> events.BatchNormLayers:
    """The event with these local BatchNorm layers, and the number of synchronised ones."""
    synchronised = sum(isinstance(each, SyncBatchNorm) for each in gc.get_objects())
    names = tuple(sorted(each.full_name() for each in layers))
    return events.BatchNormLayers(layers=names, synchronised=synchronised)


def split_degrees() -> dict[str, int]:
    """The axes but data along which fleet splits the model, with their degrees."""
    group = getattr(fleet.fleet, "_hcg", None)  # private: the public getter raises if there is none
    if group is None:
        return {}
    degrees = {
        "tensor": group.get_model_parallel_world_size(),
        "pipeline": group.get_pipe_parallel_world_size(),
        "sharding": group.get_sharding_parallel_world_size(),
        "sequence": group.get_sep_parallel_world_size(),
    }
    return {axis: degree for axis, degree in degrees.items() if degree > 1}
