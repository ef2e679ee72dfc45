"""Starts jobs: argv and environment (pure functions), processes, their logs and their failures.

A rank of a recipe reads it again, and calls an entry point of `assembly`, `export` or `proof`. Ranks join in `mesh/`.
"""
