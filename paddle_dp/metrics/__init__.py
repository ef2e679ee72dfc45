"""The shelf of metrics: each file is one, and its name is the value of `metrics: [{use: …}]`.

Metrics are scores of evaluations, over all held-out samples, on any number of ranks (core/metric.py has the contract).
"""
