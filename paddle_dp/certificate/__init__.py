"""The evidence that a run leaves: its certificate, and the records of verdicts that a training may cite as its proof.

`certificate` is a callback; `verified` keeps the records, and looks for the one with the training's identity. `proof`
compares and replays; `identity` decides whether two trainings are the same.
"""
