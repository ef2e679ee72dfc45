"""Examines a machine, or each node of a job, before a training starts there (`paddle-dp doctor`).

`machine` checks the system and how nodes can meet, `examine` starts real ranks, too: `rank`. `prove` runs this
package's verbs on the machine's cards (`--prove`): `prove_steps`, `prove_rank`, and `proof_file` for the result.
"""
