"""From a recipe or a user's own objects to a trainer: reads data, builds the parts, tries them, places the model.

`assemble` makes the trainer of a recipe, `script` makes `Trainer.of`; `first_forward` and `trial` run a user's model
before a rank does. The training itself is `train`; recipes are read by `recipe`.
"""
