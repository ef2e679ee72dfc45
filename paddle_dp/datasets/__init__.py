"""The data sets, a shelf: each file is one; its name is the word behind `dataset: {use: …}`.

A file holds one frozen `Config` whose `build(split)` gives `len(ds)` and `ds[i] -> (input, target)` as arrays. Order,
batches and workers are the subject of `data/`. Files that begin with `_` are shared by several data sets.
"""
