"""Runs one job on several machines: each machine's `paddle-dp` is a node, and the nodes meet at node 0, without etcd.

`messages` seals the lines of a connection with the job's secret. `rendezvous` tracks the nodes and decides their next
step, as a state machine without sockets. `server` serves the rendezvous at its port, in node 0's process. `member` is a
node's connection to it, also node 0's. `job` runs a node from joining to leaving.
"""
