"""The shelf of data sets: each file is one, and its name is the value of `dataset: {use: …}`.

A file holds one frozen `Config`; its `build(split)` returns a data set with `len(ds)` and `ds[i] -> (input, target)` as
arrays. `data/` handles order, batches and workers. Several data sets share the files that begin with `_`.
"""
