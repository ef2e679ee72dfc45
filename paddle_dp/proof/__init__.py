"""`paddle-dp verify`: compares the first steps of a recipe on one process and on N ranks, number by number.

Only the command line imports this package. One side after the other, then the comparison:

    verify         the command: sides starts each side's processes, trace runs a side inside its ranks
    trace          samples: of both sides · watched: one run · record: its numbers · layer_state: other changes
                   noise: the runs with noise · replay: updates once more
    trace_files    the files of a side: the comparison reads nothing else
    compare        the distances of the first steps; steps: of the later ones; rehearsed: of two trainings (rehearsal)
    tolerance      the distance that counts as the same, and the fault that must show
    verdict        SAME, DIFFERENT, PROVES NOTHING or FAILED, from these comparisons, and its sentences (report);
                   diagnose, dependence and first_difference explain it
    certified      `paddle-dp certificate`: a run's own records, retrained in part (retrain)
"""

from paddle_dp.proof.sides import Side, SideRunner
from paddle_dp.proof.verdict import Verdict, compare_sides
from paddle_dp.proof.verify import verify

__all__ = ["Side", "SideRunner", "Verdict", "compare_sides", "verify"]
