"""The shelf of schedules: each file is one, and its name is the value of `schedule: {use: …}`.

A schedule is arithmetic: `rate(step, …)` is the learning rate of update number `step`, counted from 0.
"""
