"""The callbacks, a shelf: screen, dashboard, metrics file, checkpoints, evaluations, early stop, profiles.

Each file is one callback; its name is the word behind `callbacks: [{use: …}]`. Files that begin with `_` are shared by
several. The contract of a callback is in `train.callback`, how a checkpoint is written in `checkpoint`.
"""
