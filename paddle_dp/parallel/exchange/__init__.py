"""The exchange of gradients while backward runs: when one is final, and how it travels to where it is summed.

`gradient_exchange` is the contract, and `grad_ready_hooks` say when a gradient is final. On CPUs `pushed_gradients`
sends it by `push`, in segments, to the ranks that add these up (`push_reduce`). On accelerators `bucketed_gradients`
fills `buckets` and reduces them, those of several owners side by side (`lanes`). New parameters travel by `push`
and `async_param_broadcast`. A gradient may travel in 16 bits or in `low_rank`; `residuals` remember what that takes
from it, and `roundings` bounds that for a proof. `elastic_average` is the center of ranks that do not wait for each
other.

The learners that use it are in `parallel/data_parallel_learner.py`, `hybrid.py`, `branches` and `server`.
"""
