"""All cases of the zoo by their names."""

from __future__ import annotations

from tests.proof.zoo.case import Fault, Honest
from tests.proof.zoo.faults import FAULTS
from tests.proof.zoo.honest import HONEST

CASES: dict[str, Fault | Honest] = {case.name: case for case in (*FAULTS, *HONEST)}
assert len(CASES) == len(FAULTS) + len(HONEST), "two cases have one name"
LIGHT = tuple(name for name, case in CASES.items() if isinstance(case, Fault) or not case.heavy)
