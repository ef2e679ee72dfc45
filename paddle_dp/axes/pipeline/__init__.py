"""The pipeline axis: stages of blocks, their schedules, the exchange between stages, and the learner.

`core.blocks` finds a model's blocks, `plan` decides how many each stage gets. The schedules are fleet's.
"""
