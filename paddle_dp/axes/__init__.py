"""The axes that split a model: tensor, pipeline, sequence and sharding, a folder each.

`axes_exchange` composes them for the strategy `hybrid`; `meta_init` builds one rank's slices, and `cut_check` tries
them. The ranks' coordinates on the axes are `mesh.degrees`; the exchange of whole gradients is `exchange`.
"""
