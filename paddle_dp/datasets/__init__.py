"""A shelf: what can be read. Each file is one data set; its name is the word behind `dataset: {use: …}`.

A file holds one frozen `Config` whose `build(split)` gives `len(ds)` and `ds[i] -> (input, target)` as
arrays. Batches, order, shares and workers are the business of `data/`; files that begin with `_` are shared
by data sets.
"""
