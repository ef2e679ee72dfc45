"""Silent faults, a file for each axis; `FAULTS` is all of them."""

from importlib import import_module

NAMES = (
    "data",
    "gradients",
    "norms",
    "randomness",
    "updates",
    "tensor",
    "sequence",
    "pipeline",
    "sharding",
    "training",
    "occasional",
    "liars",
    "invented",
)
FILES = tuple(import_module(f"{__name__}.{name}") for name in NAMES)
FAULTS = tuple(fault for file in FILES for fault in file.FAULTS)
