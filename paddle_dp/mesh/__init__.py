"""The joined ranks, their coordinates, and the few exchanges between them that do not belong to a model.

Nothing here knows recipes, data or models. `exchange` has the gradients'; `launch` starts processes.
"""

from paddle_dp.mesh.mesh import Mesh, join, new_group

__all__ = ["Mesh", "join", "new_group"]
