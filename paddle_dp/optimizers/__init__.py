"""The shelf of optimizers: one a file, its file name the word after `optimizer: {use: …}`.

A part makes a `paddle.optimizer.Optimizer` from a schedule and the named parameters, and says what decays.
How gradients come together before the update lives in `parallel`, the rate over time in `schedules`.
"""
