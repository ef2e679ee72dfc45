"""Starts a job of any entry point, as `paddle-dp train` starts its own: python run_job.py '{"entry_point": …, …}'."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, os.getcwd())

from paddle_dp.launch.command import Job
from paddle_dp.launch.start import run

if __name__ == "__main__":
    words = json.loads(sys.argv[1])
    words["overrides"] = tuple(words["overrides"])
    sys.exit(run(Job(**{**words, "recipe": Path(words["recipe"])})))
