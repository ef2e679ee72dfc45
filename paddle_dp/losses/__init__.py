"""The shelf of losses: each file is one, and its name is the value of `loss: {use: …}`.

`loss(outputs, targets)` returns (total, count), never a mean; `learner` divides by the count of the global batch.
"""
