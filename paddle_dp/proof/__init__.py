"""`paddle-dp verify`: compares the first steps of a recipe on one process and on N ranks, number by number.

Only the command line imports this package.
"""

from paddle_dp.proof.sides import Comparison, Side
from paddle_dp.proof.verdict import Verdict, compare_sides
from paddle_dp.proof.verify import verify

__all__ = ["Comparison", "Side", "Verdict", "compare_sides", "verify"]
