"""The shelf of models: plain Paddle, one architecture per file; the file's name is the word after `model: {use: …}`.

Nothing here knows about ranks or imports paddle_dp: every strategy places the same model.
Your model needs no file here: `use: my_package.my_module.MyLayer` names any `paddle.nn.Layer`.
"""
