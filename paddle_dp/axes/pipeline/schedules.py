"""Fleet's pipeline schedules, extended where needed; one class per value of `pipeline_schedule`.

| recipe                        | fleet's class                        | changes                              |
|-------------------------------|--------------------------------------|--------------------------------------|
| 1f1b                          | PipelineParallel                     |                                      |
| f_then_b                      | PipelineParallel                     | its steps, all forwards first        |
| f_then_b, virtual_stages: 2 … | PipelineParallelWithInterleaveFthenB | on two ranks, too                    |
| interleaved                   | PipelineParallelWithInterleave       | on two ranks, too; also with as many |
|                               |                                      | micro-batches as ranks               |

Fleet's zero bubble (DualPipeVParallel) needs CUDA streams, deep_ep, equal micro-batches, and layers with a split
backward; it is not supported.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.meta_parallel import PipelineParallel, PipelineParallelWithInterleave
from paddle.distributed.fleet.meta_parallel.pipeline_parallel import PipelineParallelWithInterleaveFthenB

from paddle_dp.axes.pipeline.p2p import AsynchronousP2P, GroupsByDirection, P2PWithGradGroup
from paddle_dp.batch import leaves, structure_of
from paddle_dp.core.data_group import HCG
from paddle_dp.errors import UsageError
from paddle_dp.plan.pipeline_schedule import Work

Around = Callable[[Work], AbstractContextManager[Any]]
MAX_SHAPES = 16  # cached batch shapes; training has two, full and last, and so has evaluation


class Engine(PipelineParallel):
    """Adds to each of fleet's schedules a context around each piece of work, and changing batch shapes."""

    around: Around = staticmethod(lambda work: nullcontext())
    accumulate_steps: int
    num_stages: int
    micro_batch_id: int
    scaler: Any
    total_loss: Any
    user_hooks_enabled: bool
    _p2p_helper: Any

    def learn(self, inputs: list[Any], targets: list[Any]) -> None:
        """Runs forward and backward of all micro-batches, in this schedule's order. Collective over the pipeline."""
        self._begin(("learn", *(_shapes(x) for x in inputs)))
        if self.accumulate_steps != len(inputs):
            self.accumulate_steps = len(inputs)
            self._init_user_hooks()  # they depend on the number of micro-batches
        self.loss_fn_idx = 0
        self._layers.reads = structure_of(inputs[0])
        self.forward_backward_pipeline([_by_leaf(inputs), _by_leaf(targets)], scaler=None)
        if isinstance(self._p2p_helper, AsynchronousP2P):
            self._p2p_helper.flush()

    def predict(self, inputs: Any) -> Any:
        """The outputs of one micro-batch on the last stage, None elsewhere. Collective over the pipeline.

        Fleet's eval_batch would need as many micro-batches as stages under its interleaved schedule. Stages do not wait
        for each other: the first may run the next micro-batch while the last runs this one.
        """
        self._begin(("predict", _shapes(inputs)))
        chunks, x = self._layers.get_num_virtual_stages(), _flat(inputs)
        self._layers.reads = structure_of(inputs)
        for chunk in range(chunks):
            self.set_virtual_pipeline_rank(chunk)
            if not self.is_pipeline_first_stage():
                x = self._p2p_helper.recv_forward(False, batch_p2p_comm=self._use_batch_p2p_comm)
                self._arrive()
            x = self._layers.forward(x, chunk_id=chunk if chunks > 1 else None)
            if not self.is_pipeline_last_stage():
                self._p2p_helper.send_forward(x, False, batch_p2p_comm=self._use_batch_p2p_comm)
                x = None
        self.set_virtual_pipeline_rank(0)
        if isinstance(self._p2p_helper, AsynchronousP2P):
            self._p2p_helper.flush()
        return x

    def _arrive(self) -> None:
        if isinstance(self._p2p_helper, AsynchronousP2P):
            self._p2p_helper.arrive()

    def _broadcast_final_loss(self, *_: Any) -> None:
        """Does nothing: `MicroBatchLoss` has the loss of each micro-batch, and the other stages do not need it.

        Fleet's broadcast assumes float32 or float16 (3.3.1), so stages hang in float64.
        """

    def _begin(self, shapes: tuple[Any, ...]) -> None:
        """Selects fleet's list of exchanged shapes for a batch of these shapes; the exchange fills a new list.

        Fleet's single list grows with every micro-batch under 1f1b, and is never renewed under interleaved, where a
        short batch then fails (3.3.1). All stages read the same samples, so they select the same list.
        """
        self._done: Counter[tuple[str, int]] = Counter()
        if shapes not in self._meta_lists and len(self._meta_lists) >= MAX_SHAPES:
            self._meta_lists.clear()
        self._p2p_helper._send_recv_meta_list = self._meta_lists.setdefault(shapes, [])
        self._p2p_helper._dynamic_cnt = 0
        self.set_virtual_pipeline_rank(0)

    def _next(self, kind: Any) -> Work:
        """The next piece of work; each chunk runs the micro-batches in order."""
        chunk = self._virtual_pp_rank or 0
        self._done[kind, chunk] += 1
        return Work(kind, self._done[kind, chunk] - 1, chunk)

    def _forward_step(self, *args: Any, **more: Any) -> Any:
        self._arrive()
        with self.around(self._next("forward")):
            stepped = super()._forward_step(*args, **more)
        if self.is_pipeline_last_stage():
            return stepped
        output = _output(stepped)
        return _with_gradient(output) if stepped is output else (_with_gradient(output), *stepped[1:])

    def _backward_step(self, stage_input: Any, *args: Any, **more: Any) -> Any:
        with self.around(self._next("backward")):
            return _or_zeros(super()._backward_step(stage_input, *args, **more), stage_input)

    # On an accelerator: whether stages overlap the exchange with compute. On CPUs sends never wait.
    asynchronous = True

    def __init__(self, layers: Any, hcg: HCG, strategy: Any):
        overlaps = self.asynchronous and paddle.get_device() != "cpu"
        groups = GroupsByDirection(hcg) if overlaps else None
        super().__init__(layers, groups or hcg, strategy)
        if groups is not None:
            self._p2p_helper = AsynchronousP2P(groups, self._p2p_helper)
        self._meta_lists: dict[tuple[Any, ...], list[Any]] = {}


def _shapes(inputs: Any) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) for leaf in leaves(inputs))


def _flat(inputs: Any) -> Any:
    """A tensor, or a tuple of the tensors of a structure, which fleet passes between stages."""
    return inputs if isinstance(inputs, paddle.Tensor) else tuple(leaves(inputs))


def _by_leaf(micro_batches: list[Any]) -> Any:
    """The list of the micro-batches' tensors; for structures a tuple of such lists, one per leaf, as fleet expects."""
    if isinstance(micro_batches[0], paddle.Tensor):
        return micro_batches
    return tuple(list(leaf_tensors) for leaf_tensors in zip(*map(leaves, micro_batches), strict=True))


@contextmanager
def unsynchronized(model: nn.Layer) -> Iterator[None]:
    """Wraps the construction of an engine if ranks hold equal weights already, or weights without memory (stage 3):
    fleet would broadcast them all."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        tensor.no_sync = True  # fleet's flag
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.no_sync = False


def _with_gradient(output: Any) -> Any:
    """A stage's output as tensors that require a gradient, even if nothing in the stage does; integers stay.

    Fleet sends gradients back only for such outputs, but always waits for them (3.3.1): the stages hang after a first
    stage that is frozen or has no weights. Raises UsageError if there are only integers.
    """
    if isinstance(output, tuple) and any(map(_floats, output)):
        return tuple(_with_gradient(each) if _floats(each) else each for each in output)
    if not _floats(output):
        dtype = leaves(output)[0].dtype
        raise UsageError(
            f"strategy.pipeline: a stage ends with an output of {dtype}, which has no gradient. End it after "
            "a later block: set strategy.partition."
        )
    if not output.stop_gradient:
        return output
    output = output.detach()
    output.stop_gradient = False
    return output


def _or_zeros(gradient: Any, stage_input: Any) -> Any:
    """The gradients of a stage's inputs, with zeros for an input that its outputs do not depend on: fleet has None,
    which it does not send."""
    if isinstance(stage_input, tuple):
        learning = [tensor for tensor in stage_input if not tensor.stop_gradient]
        return tuple(map(_or_zeros, gradient, learning))
    is_missing = gradient is None and stage_input is not None and not stage_input.stop_gradient
    return paddle.zeros_like(stage_input) if is_missing else gradient


def _floats(value: Any) -> bool:
    return isinstance(value, paddle.Tensor) and value.is_floating_point()


class ForwardThenBackward(Engine):
    """Runs all forwards, then all backwards: simple, but keeps the activations of all micro-batches."""

    def forward_backward_pipeline(self, data: Any, scaler: Any = None, **more: Any) -> None:
        """Runs one batch, with the steps of fleet's 1F1B in another order."""
        first, last, p2p = self.is_pipeline_first_stage(), self.is_pipeline_last_stage(), self._p2p_helper
        self.scaler, self.total_loss, self.micro_batch_id = scaler, None, 0
        self.user_hooks_enabled = False  # they belong to fleet's schedule
        micro_batches, pending = self._wrap_data(data), deque[tuple[Any, Any]]()
        for _ in range(self.accumulate_steps):
            stage_input = p2p.recv_forward(first, batch_p2p_comm=self._use_batch_p2p_comm)
            output = _output(self._forward_step(stage_input, micro_batches))
            p2p.send_forward(output, last, batch_p2p_comm=self._use_batch_p2p_comm)
            pending.append((stage_input, output))
            if not last:
                self._release_output(output)
        while pending:
            stage_input, output = pending.popleft()
            gradient = p2p.recv_backward(last, batch_p2p_comm=self._use_batch_p2p_comm)
            given_gradient = self._backward_step(stage_input, output, gradient)
            p2p.send_backward(given_gradient, first, batch_p2p_comm=self._use_batch_p2p_comm)


def _output(stepped: Any) -> Any:
    """A stage's output; 3.3 also returns two values that only fleet's overlapping schedules use."""
    is_triple = isinstance(stepped, tuple) and len(stepped) == 3 and stepped[1] is None and stepped[2] is None
    return stepped[0] if is_triple else stepped


class _VirtualStages(Engine):
    """Several stages on each rank. On two ranks, which fleet refuses, gradients have a separate group."""

    asynchronous = False

    def __init__(self, layers: Any, hcg: HCG, strategy: Any):
        groups = GroupsByDirection(hcg) if hcg.get_pipe_parallel_world_size() == 2 else None
        super().__init__(layers, groups or hcg, strategy)
        if groups is not None:
            self._p2p_helper = P2PWithGradGroup(groups, self._p2p_helper)

    def _check_sanity(self) -> None:
        """Does nothing: plan.legal has checked the number of micro-batches, and two ranks use `P2PWithGradGroup`."""


class Interleaved(_VirtualStages, PipelineParallelWithInterleave):
    """The stages of a rank alternate: less idle time, more communication."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        # Fleet's batched exchange in four directions does not support changing shapes. The overlapped one does, and a
        # stage can run a backward while it waits for the next forward's input.
        self._overlap_p2p_comm, self._use_batch_p2p_comm = True, False


class InterleavedForwardThenBackward(_VirtualStages, PipelineParallelWithInterleaveFthenB):
    """The stages of a rank alternate, all forwards first."""


ENGINES: dict[tuple[str, bool], type[Engine]] = {  # schedule, and whether a rank holds several stages
    ("1f1b", False): Engine,
    ("f_then_b", False): ForwardThenBackward,
    ("f_then_b", True): InterleavedForwardThenBackward,
    ("interleaved", True): Interleaved,
}
