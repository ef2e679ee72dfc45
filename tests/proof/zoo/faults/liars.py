"""Models that draw or remember.

The model itself is at fault (`tests/proof/zoo/liars.py`), and nothing in the package. Another order of one process's
samples changes what most of these learn as much as more ranks do.
"""

from __future__ import annotations

from tests.proof.zoo.case import Fault, Setting
from tests.proof.zoo.liars import Liar

FAULTS = tuple(
    Fault(
        name=model.__name__,
        says=model.__doc__ or "",
        source="our own, invented beside stochastic depth, MoCo and centres",
        setting=Setting("mlp", 2, (f"model={{use: tests.proof.zoo.liars.{model.__name__}}}",)),
    )
    for model in Liar.__subclasses__()
)
