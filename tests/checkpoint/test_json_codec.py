from __future__ import annotations

import json
import math

import numpy as np
import pytest

from paddle_dp.checkpoint.json_codec import decode, encode


def test_numbers_that_are_not_finite_survive_in_standard_json():
    text = encode({"a": [float("nan"), float("inf"), -float("inf")], "b": 0.1})
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not standard JSON"))
    back = decode(text)
    assert math.isnan(back["a"][0]) and back["a"][1:] == [math.inf, -math.inf]
    assert back["b"] == 0.1


def test_plain_values_come_back():
    value = {"a": None, "b": True, "c": [1, [2.5, "x"]], "d": {"e": 2**70, "ü": "\n"}}
    assert decode(encode(value)) == value


def test_numpy_numbers_become_plain():
    value = {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)}
    assert decode(encode(value)) == {"a": 0.5, "b": 3, "c": True}


def test_a_value_that_is_not_plain_is_named():
    with pytest.raises(TypeError, match=r"state\.a\[1\] is a ndarray"):
        encode({"a": [0, np.zeros(2)]})
    with pytest.raises(TypeError, match="key 3"):
        encode({"a": {3: 1}})
    with pytest.raises(TypeError, match=r"\$float"):
        encode({"$float": "nan"})


@pytest.mark.parametrize("text", [b"NaN", b'{"a": Infinity}', b"{", b"\xff", b'{"$float": "x"}'])
def test_what_is_not_standard_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"JSON|Expecting|utf-8|float"):
        decode(text)
