"""The exchange of gradients while backward runs: when one is final, and how it travels to where it is summed.

`gradient_exchange` is the contract, and `fires` says when a gradient is final. On CPUs `pushed_gradients` sends it by
`push` to who adds it up (`push_reduce`). On accelerators `bucketed_gradients` fills `buckets` and reduces them, those
of several owners side by side (`lanes`). New values travel by `push` and `travelling_values`. Compressed are gradients
in 16 bits and `low_rank`; `error_memory` remembers what that takes. `roundings` bounds what rounding takes, for a
proof. `elastic` is the center of ranks that do not wait for each other.

The learners that use it are in `parallel/data_parallel_learner.py`, `hybrid.py`, `branches` and `server`.
"""
