"""Explains that a device's memory was too small: the rank's memory there, and settings that reduce it."""

from __future__ import annotations

from paddle_dp.errors import OutOfMemoryError
from paddle_dp.learner.learner import Learner
from paddle_dp.learner.memory import size, states
from paddle_dp.mesh import Mesh
from paddle_dp.train.meter import peak_memory

MB = 1e6
OOM_MESSAGE = "Out of memory error"


def is_cause(error: Exception) -> bool:
    """True if a device ran out of memory; in a Python backward Paddle raises an OSError for it (3.3.1)."""
    return OOM_MESSAGE in str(error)


def explained(error: Exception, learner: Learner, mesh: Mesh, step: int) -> OutOfMemoryError:
    """Paddle's error in update `step` of this rank, with the bytes of parameters, gradients and optimizer states."""
    parameters = [parameter for _, parameter in learner.placed.named_parameters()]
    sizes = {
        "parameters": size(parameters),
        "gradients": size(parameter.grad for parameter in parameters if not parameter.stop_gradient),
        "optimizer states": size(states(learner.optimizer)),
    }
    known = ", ".join(f"{name} {bytes_ / MB:.3g} MB" for name, bytes_ in sizes.items())
    peak = peak_memory(mesh.device)
    rest = max(peak - sum(sizes.values()), 0)
    return OutOfMemoryError(
        f"step {step}: rank {mesh.rank} ran out of memory on {mesh.device}. It held {known}; at its peak, "
        f"{peak / MB:.3g} MB, the other {rest / MB:.3g} MB were activations, buffers and exchanged tensors. "
        f"Paddle reports: {_oom_sentence(error)}\n"
        "To reduce it: a larger train.micro_batches, strategy.recompute, strategy.sharding over more ranks "
        "(sharding_stage 3 keeps parameters with their owners, too), strategy.offload. "
        "`paddle-dp check RECIPE --ranks N` works it out."
    )


def _oom_sentence(error: Exception) -> str:
    """The sentence with the numbers in Paddle's message."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next(line[line.index(OOM_MESSAGE) :] for line in lines if OOM_MESSAGE in line)
