"""The shelf of schedules: one a file, its file name the word after `schedule: {use: …}`.

A schedule is arithmetic: `rate(step, …)` is the learning rate of update number `step`, counted from 0.
What an update does with the rate lives in `optimizers`.
"""
