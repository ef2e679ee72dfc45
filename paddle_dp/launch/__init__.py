"""Starts jobs: a job as argv and environment (pure functions), its processes, their logs and their failures.

A worker process reads its recipe again and calls an entry point of `train`, `export` or `proof`. How the ranks join is
the subject of `mesh/`.
"""
