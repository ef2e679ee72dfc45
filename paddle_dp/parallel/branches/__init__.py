"""Branches of a layer that do not depend on one another, dealt to the ranks of a group; outputs meet at its join.

A layer's `branches` table names them: each a chain of its sublayers, which begins with one of the layer's inputs. At
the layer's call a rank computes its own chains, gets the outputs of the others from those who have them, and runs the
layer's own forward with these outputs in place of the chains. So all ranks of the group compute what comes before and
behind, the same on each: every rank has the gradient of every branch's output itself, and backward only adds up the
gradients of the layer's inputs. A weight is kept by the rank of its branch alone; one that branches of several ranks
share is kept by all, and its gradients are added up.

`branch_trace` reads the tables and tries them against the model, `assignment` gives each branch a rank,
`branched_model` does so with a model in place, `branch_forward` is such a layer's forward, and `branch_exchange` sends
its tensors; `learner` updates what this rank has.
"""
