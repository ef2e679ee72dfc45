"""A data set, or a stream, with something done to each sample that is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle_dp.data.sample import Classified, Named
from paddle_dp.data.stream import Stream


class Each:
    """`dataset` whose samples are what `do` makes of them; the names of its classes are kept."""

    def __init__(self, dataset: Any, do: Callable[[Any], Any]):
        self.dataset, self.do = dataset, do
        if isinstance(dataset, Classified):
            self.classes = dataset.classes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.do(self.dataset[index])


class EachNamed(Each):
    """The same of a data set whose samples have names."""

    def name_of(self, index: int) -> str:
        name: str = self.dataset.name_of(index)
        return name


def each(dataset: Any, do: Callable[[Any], Any]) -> Any:
    """The data set, which may be a `Stream`, with `do` done to its samples."""
    if isinstance(dataset, Stream):
        return dataset.then(do)
    return (EachNamed if isinstance(dataset, Named) else Each)(dataset, do)
