"""Writes docstrings of Python's standard library into corpus.jsonl, an object {"text": …} on each line."""

import importlib
import inspect
import json
import random
from pathlib import Path

MODULES = ("calendar", "cmath", "datetime", "decimal", "fractions", "heapq", "itertools", "math", "operator")

texts = set()
for name in MODULES:
    module = importlib.import_module(name)
    members = [value for value in vars(module).values() if callable(value)]
    members += [value for each in members if inspect.isclass(each) for value in vars(each).values()]
    for documented in (module, *members):
        if isinstance(text := inspect.getdoc(documented), str) and len(text) > 20:
            texts.add(" ".join(text.split("\n\n")[0].split()) + "\n")  # its first paragraph, on one line
lines = [json.dumps({"text": text}) + "\n" for text in sorted(texts)]
random.Random(0).shuffle(lines)  # the end of the file is held out
Path("corpus.jsonl").write_text("".join(lines))
print(f"corpus.jsonl: {len(lines)} docstrings, {sum(map(len, texts)) / 1e3:.0f} kB of text")
