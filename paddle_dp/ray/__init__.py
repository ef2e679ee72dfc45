"""Trainings on a Ray cluster: `RayJob` starts a node of a job on several of its machines, as one actor each;
`RayExecutor` starts the trials of a sweep.

An actor runs `paddle-dp train --nodes …`, so watching, restarts and checkpoints are any other job's. Ray's
public interface alone is used, and imported when a job runs. Nothing else in the package knows of Ray.
"""

from paddle_dp.ray.ray_job import RayJob, RayResult
from paddle_dp.ray.ray_trials import RayExecutor

__all__ = ["RayExecutor", "RayJob", "RayResult"]
