"""The sharding axis (ZeRO): each parameter is updated by one owner; ZeRO-3; optimizer states offloaded to the host.

`zero` assigns an owner to each parameter, whose new values `param_broadcast` sends to all ranks. `stage3` frees and
gathers parameters: by `pulled_params` on CPUs, by `broadcasts` on accelerators (one `chunk` at a time, in the order of
`prefetch_trace`, or in `rounds`).
`axes.axes_exchange` exchanges the gradients of stages 1 and 2; `plan` refuses unsupported settings early.
"""
