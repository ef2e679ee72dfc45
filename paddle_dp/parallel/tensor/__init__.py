"""The tensor axis: layers cut by columns or rows, and losses over cut classes.

A model's `cuts` table (see `part.annotation`) says what is cut. The layers' exchange is fleet's own, on CPUs replaced
by `paddle_dp.gloo`.
"""
