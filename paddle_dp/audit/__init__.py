"""`paddle-dp audit`: runs any distributed training script under hooks, and reports where it differs from one process.

The script is not changed: `runner` installs the hooks and runs it, on N ranks and once more on one process. Each rank
writes `events` to files, which the judges read afterwards. The audit sends nothing through the script's process groups,
so it can neither block the script nor change its messages. (`proof` compares recipes.)
"""

from paddle_dp.audit.audit import Script, audit

__all__ = ["Script", "audit"]
