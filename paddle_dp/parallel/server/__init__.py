"""A parameter server (Li et al. 2014, OSDI): servers that own the parameters, workers that compute gradients.

`served` has the parts of a learner for synchronous updates: owners, exchange, norm, weights. `async_worker` computes
shares without waiting for other workers, and an `async_server` answers it. From an accelerator gradients are sent by
`copied_gradients`. `host_group` exchanges tensors of the workers' layers through server 0.
"""
