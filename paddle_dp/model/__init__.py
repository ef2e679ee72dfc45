"""Changes to a model that no layout splits: initial weights, recompute, compiled forwards, quick kernels for CPUs.

Layers that hold a slice of a weight are in `axes`, models to train in the folder models/. `core.blocks` finds a model's
blocks.
"""
