"""Number formats: Paddle's autocast and loss scaling, and an emulation of its rounding on CPUs.

`paddle_dp.recipe.schema` has a recipe's settings. The optimizers keep master weights.
"""
