"""Runs one job on several machines: each machine's `paddle-dp` is a node, and the nodes meet at node 0, without etcd.

`messages` seals messages with the job's secret. `rendezvous` decides the nodes' next step, as a state machine without
sockets; `connections` serves it in node 0's process, and connects each node to it. `job` runs a node from joining to
leaving.
"""
