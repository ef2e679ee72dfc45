"""Trains one recipe under many settings, `paddle-dp sweep`: axes of settings, Optuna's search, a run folder a trial.

A trial is a job as a person would start it, in processes, or on the nodes of a Ray cluster; nothing here trains. The
extra `sweep` has Optuna; `report` draws the comparison, and `launch` supervises each trial.
"""
