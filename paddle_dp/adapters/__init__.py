"""The shelf of adapters: each file is one, and its name is the value of `adapter: {use: …}`.

A part adds small parameters to a model's layers, in place. These are trained, and all others are frozen. `core.lora`
implements their computation and how they are split.
"""
