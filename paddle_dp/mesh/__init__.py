"""Who we are: the joined ranks, and the few things that they say to each other outside a model's own exchange.

Nothing here knows of recipes, data or models. What a model's tensors exchange belongs to `parallel`; how processes are
started belongs to `launch`.
"""

from paddle_dp.mesh.mesh import Mesh, join

__all__ = ["Mesh", "join"]
