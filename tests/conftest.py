"""What every test stands on: one thread per process, a quiet Paddle, and this checkout for every child process."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports paddle: thread pools of several ranks on few cores would fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_minloglevel", "2")
paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
for leftover in [name for name in os.environ if name.startswith("PADDLE_")]:
    del os.environ[leftover]
