"""The sharding axis (ZeRO): each parameter is updated by one owner; ZeRO-3; optimizer states offloaded to the host.

`parallel.hybrid` does the other exchange between ranks of this axis; `plan` refuses unsupported settings early.
"""
