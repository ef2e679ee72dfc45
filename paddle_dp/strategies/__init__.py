"""The shelf of strategies: one a file or folder, its file name the word after `strategy: {use: …}`.

A strategy places a model on the mesh and returns a learner; `learner` computes the updates. Nothing imports this
folder: `part` finds its files by name.
"""
