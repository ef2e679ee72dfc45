"""The shelf of losses: one a file, its file name the word after `loss: {use: …}`.

`loss(outputs, targets)` returns (total, count), never a mean; `parallel` divides by the count of the global batch.
"""
