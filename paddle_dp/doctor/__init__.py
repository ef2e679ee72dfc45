"""Examines a machine, or each node of a job, before a training starts there (`paddle-dp doctor`).

`machine` checks the system and how nodes can meet, `examine` starts real ranks, too: `rank`.
"""
