"""Uses of a recipe or a trained model without training: forecasts, predictions, generated text.

Nothing in `train` imports it. Evaluation is a part of a training (`train.evaluate`); programs and weights for other
tools are written by `export`.
"""
