"""The shelf of optimizers: each file is one, and its name is the value of `optimizer: {use: …}`.

A part makes a `paddle.optimizer.Optimizer` from a learning rate and the named parameters, and selects the parameters
that decay. `exchange` all-reduces the gradients before the update; `schedules` has the learning rate over time.
"""
