"""`paddle-dp audit`: runs any distributed training script under hooks, and reports where it differs from one process.

The script need not know this package and is not changed: `runner` installs the hooks and then runs it, on N ranks and
once more on one process. Each rank writes what it sees to files, as `events`; nothing is sent through the script's own
process groups, so the audit can neither block it nor change what it sends. The judges read the files afterwards.
(Recipes are compared by `proof`.)
"""

from paddle_dp.audit.audit import Options, audit

__all__ = ["Options", "audit"]
