"""Trials and comparisons that find causes for a training to differ from one process's.

`preflight` needs no ranks; `samplewise` and `model_mixing` run trials in a separate process; `repeats` and
`layer_settings` watch a training's updates. Checks that are a part of each update are in `learner.learner_checks`.
"""
