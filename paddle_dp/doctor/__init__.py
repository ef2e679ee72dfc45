"""Examines a machine, or each node of a job, before a training starts there: what `paddle-dp doctor` prints.

`machine` reads what the system says, `network` what nodes need to meet, `exchange` starts real ranks through Paddle's
launcher. A job itself is started in `launch/`.
"""

from paddle_dp.doctor.examine import PlannedJob, examine
from paddle_dp.doctor.finding import DoctorCheck

__all__ = ["DoctorCheck", "PlannedJob", "examine"]
