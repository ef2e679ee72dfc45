"""The pipeline axis: stages of blocks, the schedules that run them, what travels between, and the learner over them.

Which blocks a model has is said by `parallel.blocks`, how many go to each stage by `plan`. The schedules are fleet's.
"""
