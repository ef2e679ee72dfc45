"""Shelf: ways to place a model on the mesh. A file's name is the word behind `strategy: {use: …}`.

A file here decides where a model's parts live and hands back a learner; how an update is computed stands in
`parallel`. Nobody imports this folder: part.py finds its files by name.
"""
