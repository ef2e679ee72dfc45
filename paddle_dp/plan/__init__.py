"""Arithmetic before hardware: which layouts are legal, and which legal ones are near.

No paddle and no process here; what a layout does when it runs is `parallel`, and what the ranks are is `mesh`.
"""

from paddle_dp.plan.legal import Shape, legal_layouts, problems, refusal

__all__ = ["Shape", "legal_layouts", "problems", "refusal"]
