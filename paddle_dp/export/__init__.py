"""Exports a trained model as files that need no paddle_dp: a Paddle program and optionally ONNX, both verified.

Nothing here trains. `checkpoint` reads the weights; `train` does not import this package.
"""
