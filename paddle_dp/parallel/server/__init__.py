"""A parameter server (Li et al. 2014, OSDI): servers that own the parameters, workers that compute gradients.

`deal` gives each parameter a server, `learner` is an update of all workers together, `sums` adds up what layers of
workers exchange in a forward, without that workers talk to one another.
"""
