"""The shelf of optimizers: one a file, its file name the word after `optimizer: {use: …}`.

A part makes a `paddle.optimizer.Optimizer` from a learning rate and the named parameters, and decides which decay.
`parallel` all-reduces the gradients before the update; the rate over time is in `schedules`.
"""
