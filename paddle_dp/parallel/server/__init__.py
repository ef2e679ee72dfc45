"""A parameter server (Li et al. 2014, OSDI): servers that own the parameters, workers that compute gradients.

`learner` gives each parameter a server, and makes an update of all workers together; `asynchronous` makes an update of
each worker that comes, and an `async_server` answers it. Gradients of an accelerator leave as `copied_gradients`.
`host_group` adds up what layers of workers exchange in a forward, without that workers talk to one another.
"""
