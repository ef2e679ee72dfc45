"""Is a foreign script's distributed run what it seems? `paddle-dp audit` runs any script under hooks and tells.

The script knows nothing of this package and is not changed: `runner` installs the hooks and then runs it, on N ranks
and once more on one process. What a rank saw is written to files as `events`; nothing is sent through the script's own
process groups, so the audit can neither block it nor change what it sends. Judging happens afterwards, outside.
Recipes are compared by `proof`, and nothing here trains for its own sake.
"""

from paddle_dp.audit.audit import Options, audit

__all__ = ["Options", "audit"]
