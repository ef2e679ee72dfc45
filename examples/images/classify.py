"""Classifies images with the exported program, without paddle_dp: python classify.py IMAGE…"""

import json
import sys
from pathlib import Path

import numpy as np
import paddle
from PIL import Image

EXPORT = Path("runs/digits/export")
MEAN, STD = np.array(
    [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]
)  # image_folder's; a recipe may have others

classes = json.loads((EXPORT / "export.json").read_text())["classes"]
model = paddle.jit.load(str(EXPORT / "model"))
for path in sys.argv[1:]:
    pixels = (np.asarray(Image.open(path).convert("RGB")) / 255 - MEAN) / STD  # [32, 32, 3]
    scores = model(paddle.to_tensor(pixels.transpose(2, 0, 1)[None].astype("float32")))[0]
    print(f"{path}: {classes[int(scores.argmax())]}")
