"""Models that draw or remember.

The model itself is at fault (`tests/proof/zoo/liars.py`), and nothing in the package. Another order of one process's
samples changes what most of these learn as much as more ranks do.
"""

from __future__ import annotations

from tests.proof.zoo.case import Fault, Setting

SAYS = {
    "UnitDropRamp": "Dropout by paddle.rand at a rate that grows from 0: draws begin with the second forward.",
    "NoiseAfterWarmup": "Noise that a counter of steps switches on.",
    "NumpyDropout": "Dropout by NumPy's generator, from the third forward on.",
    "OwnGenerator": "Numbers of a generator that the layer made for itself.",
    "RandomLayerScale": "A scale for each sample by Python's generator.",
    "LastSample": "A cache of the last sample's features, which the next forward reads.",
    "Queue": "A queue of features, as MoCo's, shorter than a batch.",
    "Prototype": "A prototype that moves to the sample with the largest norm.",
    "PowerVector": "A vector as spectral norm's, iterated with the samples.",
    "MeanInFloat": "A moving mean in a Python number.",
    "PastMeans": "A list of past means.",
    "RecentMeans": "A deque of the last three means.",
    "ClassMeans": "A dict of the means of classes.",
    "Features": "The features used last, by a digest of the sample.",
    "ModuleGlobal": "A memory in a global variable of the model's module.",
    "LateCache": "A cache that is read from the fourth forward on, with a weight of 0.003.",
}
FAULTS = tuple(
    Fault(
        name=name,
        says=says,
        source="our own, invented beside stochastic depth, MoCo and centres",
        setting=Setting("mlp", 2, (f"model={{use: tests.proof.zoo.liars.{name}}}",)),
    )
    for name, says in SAYS.items()
)
