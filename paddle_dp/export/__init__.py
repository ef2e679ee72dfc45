"""Exports a trained model as files that need no paddle_dp: a Paddle program and optionally ONNX, both verified.

Nothing here trains. `checkpoint` reads what a run learned; `train` does not import this package.
"""
