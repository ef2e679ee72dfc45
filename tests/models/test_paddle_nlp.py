"""Our models are PaddleNLP's and PaddleFormers': small ones with random weights, made on the spot by their code, give
the same outputs, losses and gradients, from each kind of file that they save.

Both sides compute in float32. Needs paddlenlp or paddleformers, each in the environment that runs this.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_dp.checkpoint import TensorShard
from paddle_dp.checkpoint.other_names import names_of, translated
from paddle_dp.checkpoint.source import source
from paddle_dp.checkpoint.tensor_file import write_tensors
from paddle_dp.part import find
from paddle_dp.recipe.hf_config import read, settings_of
from tests.house.programs import run_python
from tests.models.test_hugging_face import apart, apart_in_norm

MAKER = Path(__file__).with_name("published_by_paddle.py")
USES = {
    "ernie": "bert", "ernie relu": "bert", "bert": "bert", "gpt": "gpt", "llama": "llama",
    "ernie4_5": "llama",
}  # fmt: skip
LIBRARIES = {name: "paddleformers" if name == "ernie4_5" else "paddlenlp" for name in USES}
pytestmark = [pytest.mark.long, pytest.mark.processes]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(find_spec(library) is None, reason=f"{library} not installed")
        )
        for name, library in LIBRARIES.items()
    ],
)
def test_outputs_and_gradients_are_theirs(name: str, tmp_path: Path) -> None:
    run_python(MAKER, name, tmp_path, timeout=200)
    kind = find("models", USES[name])
    settings = {**settings_of(read(tmp_path), kind, USES[name], None), "dropout": 0}
    model = kind(
        **{key: value for key, value in settings.items() if key in kind.__dataclass_fields__}
    ).build()
    tables = names_of(model)
    seen, theirs = dict(np.load(tmp_path / "seen.npz")), dict(np.load(tmp_path / "gradients.npz"))
    file = tmp_path / "gradients.safetensors"
    write_tensors(file, {n: TensorShard.full(n, g, "float32") for n, g in theirs.items()}, {"format": "np"})
    wanted, _ = translated(source(file), tables, {})
    largest = max(float(np.abs(gradient).max()) for gradient in theirs.values())
    for folder in filter(Path.is_dir, (tmp_path, tmp_path / "np", tmp_path / "pt")):
        weights, convention = translated(source(folder), tables, {})
        assert set(model.state_dict()) == set(weights.names)
        for tensor_name, tensor in model.state_dict().items():
            tensor.set_value(weights.read(tensor_name))
        model.clear_gradients()
        outputs = model(paddle.to_tensor(seen["inputs"]))
        loss = F.cross_entropy(outputs.reshape([-1, 32]), paddle.to_tensor(seen["targets"].reshape(-1)))
        loss.backward()
        pairs = [(p.grad.numpy(), wanted.read(n)) for n, p in model.named_parameters()]
        compared = [(ours, want) for ours, want in pairs if np.abs(want).max() > 1e-5 * largest]
        gradients = max(apart_in_norm(*pair) for pair in compared)
        highest = max(apart(*pair) for pair in compared)
        found = apart(outputs.numpy(), seen["outputs"])
        print(
            f"{name}, {convention} names: outputs {found:.1e}, gradients in norm {gradients:.1e}, largest {highest:.1e}"
        )
        assert (
            found < 1e-5 and gradients < 1e-5 and float(loss) == pytest.approx(float(seen["loss"]), rel=1e-6)
        )
        assert len(compared) > 10
