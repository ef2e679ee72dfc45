"""Arithmetic before hardware: which layouts are legal, which legal ones are near, and a pipeline's time table.

No paddle and no process here; what a layout does when it runs is `parallel`, and what the ranks are is `mesh`.
"""

from paddle_dp.plan.deal import Split, deal
from paddle_dp.plan.legal import Anatomy, Shape, legal_layouts, problems, refusal

__all__ = ["Anatomy", "Shape", "Split", "deal", "legal_layouts", "problems", "refusal"]
