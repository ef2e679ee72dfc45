"""Three faults of our own, described here before any of them was tried.

`swapped gradients`: an exchange in buckets puts the gradients of two parameters of one shape back in each other's
place, on every rank alike. The gradient norm of the whole model is right to the last bit, the ranks' weights are equal,
the loss of the first step is right, and the loss goes on falling. Expected: verify, which compares parameter by
parameter, names both at step 1; digests and a curve of the gradient norm see nothing.

`lazy exchange`: to save time, every third update is made from rank 0's gradient alone, broadcast to the others. All
ranks hold equal weights at all times, two of three updates are exact, and rank 0's share is an honest sample of the
batch. Expected: verify, if it looks at three steps or more; nothing in the first two.

`unequal heirs`: the last sample of a batch that the ranks cannot share equally is read by the right rank and learned
from, but the count that all divide by is that of an equal split (49 samples on 2 ranks count as 48). Full batches are
exact. Expected: verify at the short batch only, as a loss and gradients too large by 1/48, the same in every parameter.
"""
