"""Runs independent branches of a layer on different ranks of a group; their outputs join on every rank.

A layer's `branches` table lists them: each is a chain of its sublayers that begins with one of the layer's inputs. A
rank computes its local chains, receives the other chains' outputs, and runs the layer's forward with these outputs in
place of the chains. All ranks compute the same before and after the layer, so every rank has the gradient of every
branch's output, and backward only sums the gradients of the layer's inputs. Only the rank of a branch keeps its
weights; a weight shared by branches of several ranks is kept by all, and its gradients are summed.

`branch_trace` reads and tries the tables, `assignment` gives each branch a rank, `branched_model` changes a model in
place, `branch_forward` is the forward of a layer with branches, `branch_exchange` sends its tensors, and `learner`
updates this rank's weights.
"""
