"""The parts that an update is computed from: losses, gradients, placements, buffers, BatchNorm.

`loss` and `placement` are contracts of the whole package. `precision` has low precision, `dropout` exact masks. Nothing
here exchanges gradients (`exchange`) or makes an update (`learner`), and nothing knows a strategy.
"""
