"""The sharding axis (ZeRO): each parameter is updated by one owner; ZeRO-3; optimizer states offloaded to the host.

`zero` gives each parameter its owner. `stage3` frees and gathers parameters: by `pulled_params` on CPUs, by
`broadcasts` on accelerators (of a `chunk` at once, in the order of `prefetch_trace`, or in `rounds`).
`parallel.hybrid` exchanges the gradients of stages 1 and 2; `plan` refuses unsupported settings early.
"""
