"""The shelf of losses: one a file, its file name the word after `loss: {use: …}`.

A loss says what it is over: `loss(outputs, targets)` is a total and the count the total is over, never a mean.
What divides by the count of the whole global batch lives in `parallel`.
"""
