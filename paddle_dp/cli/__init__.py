"""The command line: `paddle-dp VERB …`. Each verb declares its options and calls another package.

Nothing here computes or imports paddle. Jobs are started in `launch/`, recipes read in `recipe/`, proofs made in
`proof/`.
"""

from paddle_dp.cli.app import app, main

__all__ = ["app", "main"]
