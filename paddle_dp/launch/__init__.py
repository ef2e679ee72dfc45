"""The way in: a job as argv and environment (pure), the processes that carry it out, their logs and their failures.

Nothing about training lives here: a worker reads its recipe again and hands over to `train` or `proof`.
For what happens inside a rank that is up, see `train/`; for joining the ranks, `mesh/`.
"""
