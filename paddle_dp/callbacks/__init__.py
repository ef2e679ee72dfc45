"""The shelf of callbacks: screen, dashboard, metrics file, checkpoints, evaluations, early stop, profiles.

Each file is one callback, and its name is the value of `callbacks: [{use: …}]`. Several callbacks share the files that
begin with `_`. `train.callback` has the contract of a callback; `checkpoint` writes checkpoints.
"""
