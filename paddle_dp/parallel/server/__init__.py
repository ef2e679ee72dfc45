"""A parameter server (Li et al. 2014, OSDI): servers that own the parameters, workers that compute gradients.

`deal` gives each parameter a server. `learner` is an update of all workers together, `asynchronous` one of whoever
comes, whom a server's `desk` serves. Gradients of an accelerator leave as `copied_gradients`, new parameters come as
`values`. `sums` adds up what layers of workers exchange in a forward, without that workers talk to one another.
"""
