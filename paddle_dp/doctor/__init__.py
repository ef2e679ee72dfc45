"""Examines a machine, or each node of a job, before a training starts there (`paddle-dp doctor`).

`machine` reads the system, `network` checks how nodes can meet, `exchange` starts real ranks.
"""

from paddle_dp.doctor.examine import PlannedJob, examine
from paddle_dp.doctor.finding import DoctorCheck

__all__ = ["DoctorCheck", "PlannedJob", "examine"]
