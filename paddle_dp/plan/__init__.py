"""Plans layouts by arithmetic: which are legal, which legal ones are near, memory per rank, and pipeline schedules.

It imports no paddle and starts no process. Layouts are run by `axes`; `mesh` has the ranks.
"""

from paddle_dp.plan.legal import Anatomy, Shape, layout_error, legal_layouts, problems
from paddle_dp.plan.pipeline_schedule import Partition, stage_bounds

__all__ = ["Anatomy", "Partition", "Shape", "layout_error", "legal_layouts", "problems", "stage_bounds"]
