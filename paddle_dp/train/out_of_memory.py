"""Explains that a device's memory was too small: the rank's memory there, and settings that reduce it."""

from __future__ import annotations

from paddle_dp.core.memory_error import unallocated
from paddle_dp.errors import OutOfMemoryError
from paddle_dp.learner.learner import Learner
from paddle_dp.learner.memory import size, states
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.text import amount
from paddle_dp.train.meter import peak_memory

OOM_MESSAGE = "Out of memory error"


def explained(error: BaseException, learner: Learner, mesh: Mesh, step: int) -> OutOfMemoryError:
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
    """« Paddle reports: …»: the sentence with the numbers of a device; "" on a CPU."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line[line.index(OOM_MESSAGE) :] for line in lines if OOM_MESSAGE in line), "")
    return said and f" Paddle reports: {said}"
