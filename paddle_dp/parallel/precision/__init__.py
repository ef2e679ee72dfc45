"""Number formats: Paddle's autocast and loss scaling, and an emulation of its rounding on CPUs.

`paddle_dp.recipe.precision` has a recipe's settings. Master weights are kept by the optimizers.
"""
