"""Is it the same? The first steps of a recipe on one process and on N ranks, compared number by number.

Nothing here trains for its own sake, and nothing else in paddle_dp imports this; the command line does.
"""

from paddle_dp.proof.sides import Comparison, Side
from paddle_dp.proof.verdict import Verdict, compare_sides
from paddle_dp.proof.verify import verify

__all__ = ["Comparison", "Side", "Verdict", "compare_sides", "verify"]
