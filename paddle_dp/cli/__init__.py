"""The command line: `paddle-dp VERB …`. Words only: each verb says what it asks for, and hands over.

Nothing is computed here and nothing imports paddle; what a verb does stands in the package that it calls.
A job's argv and environment are made in `launch/`, a recipe is read in `recipe/`, a proof made in `proof/`.
"""

from paddle_dp.cli.commands import app, main

__all__ = ["app", "main"]
