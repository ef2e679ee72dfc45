"""The shelf of models: plain Paddle, one architecture a file, its file name the word after `model: {use: …}`.

Nothing here knows about ranks or imports paddle_dp: every strategy places the same model.
A model of your own needs no file here: `use: my_package.my_module.MyLayer` names any `paddle.nn.Layer`.
"""
