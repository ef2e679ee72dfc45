"""Optimizers that Paddle lacks, in plain tensor operations: Lion, LARS, Adafactor, Muon.

The shelf `optimizers` has their settings. `by_parameter` is their base: the states, float32 master weights and group
decays of an optimizer that updates one parameter after the other.
"""
