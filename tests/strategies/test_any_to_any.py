"""A checkpoint of any strategy resumes in any other: the same weights, the same held-out loss, the same next batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parity import train
from tests.ranks import run_ranks

STRATEGIES = {
    "single": (1, "{use: single}"),
    "data_parallel": (2, "{use: data_parallel}"),
    "after": (2, "{use: data_parallel, exchange: after}"),
    "bfloat16": (3, "{use: data_parallel, compress: bfloat16}"),
    "power_sgd": (2, "{use: data_parallel, compress: power_sgd rank 2 after 1 step}"),
    "local_sgd": (2, "{use: local_sgd, every: 2 steps}"),
    "local_sgd, averaged": (3, "{use: local_sgd, every: 2 steps, optimizer_states: averaged}"),
    "DiLoCo": (2, "{use: local_sgd, every: 2 steps, outer: {}}"),
    "async_average": (2, "{use: async_average, every: 1 step}"),
    "parameter_server": (3, "{use: parameter_server, servers: 1}"),
    "sharding 3": (2, "{use: hybrid, sharding: 2, sharding_stage: 3}"),
    "tensor": (2, "{use: hybrid, tensor: 2}"),
    "pipeline": (2, "{use: hybrid, pipeline: 2}"),
}
ADAMW = "{use: adamw}"  # without a clip, which means another thing where ranks learn alone


def each(folder: str, source: str, targets: list[tuple[str, str]]) -> list[Any]:
    """In every rank: goes on from the source's checkpoint with each target, first to where it stands."""
    import shutil

    from paddle_dp.mesh import join

    mesh, found = join(seed=3), []
    for number, (_, strategy) in enumerate(targets):
        own = f"{folder}/to-{mesh.ranks}-{number}"
        if mesh.is_main:
            shutil.copytree(f"{source}/checkpoints", f"{own}/checkpoints")
        mesh.wait(own)
        there = train(own, strategy, until="3 steps", resume=True, optimizer=ADAMW)
        on = train(own, strategy, until="5 steps", resume=True, optimizer=ADAMW)
        found.append([there["held_out"], there["rows"], on["rows"], there["samples"]])
    return found


@pytest.mark.long
@pytest.mark.parametrize("source", STRATEGIES)
def test_any_other_strategy_goes_on(source: str, tmp_path: Any) -> None:
    ranks, strategy = STRATEGIES[source]
    saved = run_ranks(train, ranks, str(tmp_path / "source"), strategy, "3 steps", optimizer=ADAMW)[0]
    for ranks in (1, 2, 3):
        targets = [(name, words) for name, (many, words) in STRATEGIES.items() if many == ranks]
        rows = run_ranks(each, ranks, str(tmp_path), str(tmp_path / "source"), targets)[0]
        for (name, _), (held_out, before, after, samples) in zip(targets, rows, strict=True):
            np.testing.assert_allclose(held_out["loss"], saved["held_out"]["loss"], rtol=1e-5, err_msg=name)
            assert samples == saved["samples"] and not before and len(after) == 2, name
            assert np.isfinite(after).all(), name
