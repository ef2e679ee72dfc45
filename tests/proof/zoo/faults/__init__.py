"""Silent faults, a file for each axis; `FAULTS` is all of them."""

from tests.proof.zoo.faults import (
    data,
    gradients,
    invented,
    liars,
    norms,
    occasional,
    pipeline,
    randomness,
    sequence,
    sharding,
    tensor,
    training,
    updates,
)

FILES = (
    data,
    gradients,
    norms,
    randomness,
    updates,
    tensor,
    sequence,
    pipeline,
    sharding,
    training,
    occasional,
    liars,
    invented,
)
FAULTS = tuple(fault for file in FILES for fault in file.FAULTS)
