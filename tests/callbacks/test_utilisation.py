"""How much of what the devices could do is done for the model; and what each rank says of itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dp.callbacks.dashboard import FEW, Config, memories, utilisation
from paddle_dp.callbacks.dashboard.utilisation import Utilisation, peak_of
from paddle_dp.mesh import Mesh
from paddle_dp.part import find
from paddle_dp.recipe import Recipe, read_recipe
from paddle_dp.train import Run
from tests.callbacks.moments import At


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200 NVL", 835e12), ("Tesla V100-PCIE-16GB", 112e12), ("Tesla V100-SXM2-32GB", 125e12),
        ("NVIDIA A10", 125e12), ("NVIDIA A10G", None), ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12),
        ("Some GPU", None),
    ],
)  # fmt: skip
def test_the_peak_of_a_device_is_known_by_its_whole_words(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_it_is_what_is_done_over_what_could_be() -> None:
    found = Utilisation(flops=6 * 10**9, peak=1e12)
    done = found.curves({"samples_per_second": 200.0}, ranks=4)
    assert done == {"speed/model_flops_utilisation": pytest.approx(0.3)}
    assert found.curves({}, ranks=4) == {}


def of(run: Run, model: Any) -> Run:
    recipe = SimpleNamespace(build_model=model.build, model_dump=lambda mode: {})
    return dataclasses.replace(run, recipe=recipe)


def test_a_cpu_is_measured_only_against_a_given_peak(
    run: Run, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    from visualdl import LogReader

    run = of(run, find("models", "mlp")(inputs=16, hidden=(8,), classes=2))
    assert not utilisation.has_peak(run, None) and utilisation.has_peak(run, 1e9)
    dashboard = Config(peak_flops=2 * (2 * 16 * 8 + 3 * 8 * 2) * 100.0).build(run)
    dashboard.start(at("start", 0))
    dashboard.step(at("step", 1, samples_per_second=50.0))
    (path,) = (run.folder / "visualdl").iterdir()
    (point,) = LogReader(file_path=str(path)).get_data("scalar", "speed/model_flops_utilisation")
    assert point.value == pytest.approx(0.5)
    assert (run.folder / "mesh.png").read_bytes().startswith(b"\x89PNG")


def recipe_of(tmp_path: Path, more: str, strategy: str = "single") -> Recipe:
    (tmp_path / "recipe.yaml").write_text(
        "model: {use: mlp, inputs: 16, hidden: [8, 4], classes: 2}\ndataset: {use: digits}\n"
        f"loss: {{use: cross_entropy}}\nstrategy: {{use: {strategy}}}\ntrain: {{length: 1 steps, batch: 8}}\n{more}"
    )
    return read_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("more", "products"),
    [
        ("optimizer: {use: sgd}\n", 2 * 16 * 8 + 3 * 8 * 4 + 3 * 4 * 2),  # nobody needs the input's gradient
        ("optimizer: {use: sgd, groups: [{match: 'body.*', frozen: true}]}\n", 16 * 8 + 8 * 4 + 2 * 4 * 2),
        (
            "optimizer: {use: sgd}\nadapter: {use: lora, rank: 1, match: [body.0]}\n",
            16 * 8 + 2 * 16 * 1 + 3 * 1 * 8 + 2 * 8 * 4 + 2 * 4 * 2,
        ),
    ],
)
def test_a_frozen_weight_has_no_gradient_to_compute(
    run: Run, tmp_path: Path, more: str, products: int
) -> None:
    counted = utilisation.count(dataclasses.replace(run, recipe=recipe_of(tmp_path, more)), 1e12)
    assert isinstance(counted, Utilisation) and counted.flops == 2 * products


@pytest.mark.parametrize(("device", "peak"), [("gpu:0", 4e12), ("cpu", 1e12)])
def test_the_copies_of_one_rank_have_a_card_each(run: Run, tmp_path: Path, device: str, peak: float) -> None:
    recipe = recipe_of(tmp_path, "optimizer: {use: sgd}\n", "replicas, count: 4")
    counted = utilisation.count(dataclasses.replace(run, recipe=recipe, mesh=Mesh(device=device)), 1e12)
    assert isinstance(counted, Utilisation) and counted.peak == peak


def test_a_model_that_resists_is_trained_all_the_same(run: Run, at: At) -> None:
    class Resisting:
        def build(self) -> Any:
            raise RuntimeError("not here")

    run = of(run, Resisting())
    assert utilisation.count(run, 1e9) == "the model's FLOPs were not counted: RuntimeError: not here"
    dashboard = Config(peak_flops=1e9).build(run)
    dashboard.start(at("start", 0))
    dashboard.step(at("step", 1, samples_per_second=50.0))


def test_a_few_ranks_have_a_curve_each_and_many_have_two() -> None:
    assert memories([3.0, 4.0]) == {"memory_megabytes/rank 0": 3.0, "memory_megabytes/rank 1": 4.0}
    many = memories([float(n) for n in range(FEW + 1)])
    assert many == {"memory_megabytes/largest": FEW, "memory_megabytes/smallest": 0}


def test_no_operations_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="peak_flops"):
        Config(peak_flops=0.0)
