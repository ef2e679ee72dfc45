"""The tensor axis: layers sharded by columns or rows, and losses over sharded classes.

A model's `cuts` table (see `part.annotation`) selects the layers. Fleet does the layers' exchange; on CPUs
`paddle_dp.gloo` replaces it.
"""
