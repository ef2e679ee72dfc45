"""The comparison of compressed gradients: what it reads of a training, and its table."""

from __future__ import annotations

import json

from tools.benchmark.compression import outcome, row

EVENTS = [
    {"event": "start", "step": 0},
    {"event": "step", "step": 1, "sent": 4.4e7},
    {"event": "evaluated", "step": 1, "acc1": 0.5},
    {"event": "step", "step": 2, "sent": 6e5},
    {"event": "evaluated", "step": 2, "acc1": 0.975},
    {"event": "end", "step": 2},
]


def test_the_table_has_the_last_accuracy_of_each_seed_and_the_bytes_of_a_step():
    found = outcome([json.dumps(event) for event in EVENTS])
    assert (found.accuracy, found.least, found.mean) == (0.975, 6e5, 2.23e7)
    assert row("power_sgd", [found, found]) == "| `power_sgd` | 0.9750, 0.9750 | 0.9750 | 0.6 | 22.3 |"
