"""Ranks that learn alone for a period and then meet: the parts that `local_sgd` and `async_average` share.

`periods` says when ranks meet, `periodic_means` averages their weights, or steps by such a mean. Rounds of the training
loop are in `train.rounds`.
"""
