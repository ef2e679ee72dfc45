"""The joined ranks, their coordinates, and the few exchanges between them that are not a model's.

Nothing here knows recipes, data or models. A model's own exchange is in `parallel`; `launch` starts processes.
"""

from paddle_dp.mesh.mesh import Mesh, join, new_group

__all__ = ["Mesh", "join", "new_group"]
