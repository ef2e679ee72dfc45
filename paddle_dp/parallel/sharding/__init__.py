"""The sharding axis (ZeRO): each parameter's update has one owner; stage 3, and optimizer states offloaded to the host.

What else ranks of this axis exchange is `parallel.hybrid`'s. What sharding cannot do is said before a start, by `plan`.
"""
