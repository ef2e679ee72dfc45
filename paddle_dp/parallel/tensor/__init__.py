"""The tensor axis: layers cut into columns and rows, and their loss over cut classes.

How a model says what is cut stands in its `cuts` table and in `part.annotation`. Exchange between the layers is fleet's
own, on CPUs through `paddle_dp.gloo`.
"""
