"""Several machines, one job: each machine's `paddle-dp` is a node, and the nodes meet at node 0, without etcd.

`messages`: what goes over a connection, sealed with the job's secret. `rendezvous`: who is here, and what all do next,
as a state machine without sockets. `server`: the rendezvous at its port, in node 0's process. `member`: a node's own
connection to it, node 0's too. `job`: what a node does between joining and leaving, `told`: what it says
of how its ranks ended.
"""
