"""The evidence that a run leaves: its certificate, and the verdict of a proof that a training may cite.

`certificate` is a callback, `verified` finds a verdict with the training's identity. `proof` compares and replays;
`identity` decides whether two trainings are the same.
"""
