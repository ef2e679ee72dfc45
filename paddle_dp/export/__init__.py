"""A trained model as files that need none of our code: a Paddle program, on request ONNX, held against the model.

Nothing here trains. What a run learned is read by `checkpoint`; `train` knows nothing of this package.
"""
