"""The shelf of adapters: one a file, its file name the word after `adapter: {use: …}`.

A part adds small parameters to a model's layers, in place; they are trained, and what was there before is frozen. What
they compute, and how they are cut, is in `parallel`.
"""
