"""Who reacts to a training: screen, dashboard, metrics file, checkpoints, evaluations, early stop, profiles.

Each file is one callback, and its name is the recipe's word; files that start with `_` are shared by them. Never here:
what a moment is and when it is told (train), or how a checkpoint is written (checkpoint).
"""
