"""Trainings on a Ray cluster: `RayJob` starts a node of a job on several of its machines, as one actor each.

An actor runs `paddle-dp train --nodes …`, so watching, restarts and checkpoints are those of any other job. Ray's
public interface alone is used, and imported when a job runs. Nothing else in the package knows of Ray.
"""

from paddle_dp.ray.ray_job import RayJob, RayResult

__all__ = ["RayJob", "RayResult"]
