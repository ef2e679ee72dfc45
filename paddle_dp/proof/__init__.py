"""`paddle-dp verify`: compares the first steps of a recipe on one process and on N ranks, number by number.

Only the command line imports this package. One side after the other, then the comparison:

    verify         runs both sides in real processes: sides starts them, trace runs one of them inside its ranks
    trace          samples: of both sides · watched: one run · record: its numbers · layer_state: the rest that changes
                   noise: the runs with noise · replay: updates once more
    trace_files    the files of a side: the only thing that the comparison reads
    compare        the first step; steps: the later ones; rehearsed: two whole trainings (rehearsal)
    tolerance      the distance that counts as the same, and the fault that must show
    verdict        SAME, DIFFERENT, PROVES NOTHING; diagnose, dependence and first_difference explain it (report)
    certified      `paddle-dp certificate`: a run's own records, retrained in part (retrain)
"""

from paddle_dp.proof.sides import Comparison, Side
from paddle_dp.proof.verdict import Verdict, compare_sides
from paddle_dp.proof.verify import verify

__all__ = ["Comparison", "Side", "Verdict", "compare_sides", "verify"]
