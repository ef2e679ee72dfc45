"""Arithmetic before hardware: which layouts are legal, which legal ones are near, and a pipeline's time table.

No paddle and no process here; what a layout does when it runs is `parallel`, and what the ranks are is `mesh`.
"""

from paddle_dp.plan.legal import Anatomy, Shape, legal_layouts, problems, refusal
from paddle_dp.plan.partition import Partition, stage_bounds

__all__ = ["Anatomy", "Partition", "Shape", "legal_layouts", "problems", "refusal", "stage_bounds"]
