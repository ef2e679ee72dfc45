"""Number formats: Paddle's autocast and loss scaling, and the same rounding emulated where it has none (CPUs).

What a recipe may say stands in `paddle_dp.recipe.precision`. Master weights are kept by the optimizers themselves.
"""
