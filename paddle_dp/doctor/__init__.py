"""Examines a machine, or each node of a job, before a training starts there (`paddle-dp doctor`).

`machine` checks the system and how nodes can meet, `exchange` starts real ranks.
"""

from paddle_dp.doctor.examine import examine
from paddle_dp.doctor.machine import DoctorCheck

__all__ = ["DoctorCheck", "examine"]
