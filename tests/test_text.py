"""Numbers and lists in messages."""

from __future__ import annotations

import pytest

from paddle_dp.text import amount, and_more, digits, duration, few, gigabytes, numbered, plural, times


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (plural(1, "batch", "batches"), "1 batch"),
        (plural(0, "batch", "batches"), "0 batches"),
        (numbered("rank", [2]), "rank 2"),
        (numbered("rank", (0, 2)), "ranks 0, 2"),
        (numbered("rank", range(9), 8), "ranks 0, 1, 2, 3, 4, 5, 6, 7, … (9 of them)"),
        (few("abc", 2) + few("ab", 2), "a, b, …a, b"),
        ("a" + and_more("abc") + and_more("a"), "a and 2 more"),
        (and_more("abc", 2, " ({} more do, too)"), " (1 more do, too)"),
        (f"{times(2)}, {times(4)}", "twice, 4 times"),
        (f"{digits(12.345)} {digits(12345.6)}", "12.3 12346"),
        (f"{duration(0.0125)}, {duration(1.254)}", "12.5 ms, 1.25 s"),
        (f"{duration(0.9996)}, {digits(999.4)}, {digits(999.5)}", "1000 ms, 999, 1000"),
        (gigabytes(3 << 29), "1.5 GB"),
        (f"{amount(0)}, {amount(25.2e6)}, {amount(3e15)}", "0 bytes, 25.2 MB, 3000 TB"),
    ],
)
def test_what_a_message_says(text: str, expected: str) -> None:
    assert text == expected
