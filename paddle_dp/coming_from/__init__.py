"""Training configurations of other tools as recipes, with every key accounted for (`paddle-dp import`).

Nothing here trains, or reads data or weights. Words of other tools that a recipe is asked for have their hints in
`part.aliases`; weights of other tools are read by `checkpoint`.
"""
