"""The exchange of gradients while backward runs: when one is final, and how it travels to where it is summed.

`fires` says when. On CPUs `push` sends, and `push_reduce` sums at owners; the axes that use it are `parallel/sharding`
and `parallel/hybrid.py`.
"""
