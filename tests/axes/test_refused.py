"""A layout is refused by what the model itself says, before any process starts; what is proposed instead, it allows."""

from pathlib import Path

import pytest

from paddle_dp.errors import RecipeError, UsageError
from paddle_dp.recipe import Recipe, read_recipe
from tests.house.recipes import small_recipe

TEXTS = "tests.part.test_annotation.Texts"
CHAIN = 'blocks: [embed, "encoder.layers.*", [{use: paddle.mean, axis: 1}, head]]'
TOKENS = "random_tokens, vocab: 32, length: 6"
TRAIN = "length: 1 epoch, batch: 8, micro_batches: 4"
OWN = """
import paddle
from paddle import nn

def of(named_parameters):
    return [p for _, p in named_parameters]

def clipped(learning_rate, named_parameters):
    clip = nn.ClipGradByNorm(1.0)
    return paddle.optimizer.Adam(learning_rate, parameters=of(named_parameters), grad_clip=clip)

def around(learning_rate, named_parameters):
    return paddle.incubate.LookAhead(paddle.optimizer.Adam(learning_rate, parameters=of(named_parameters)))

def grouped(learning_rate, named_parameters):
    groups = [{"params": [p]} for p in of(named_parameters)]
    return paddle.optimizer.Adam(learning_rate, parameters=groups)

def own_rate(learning_rate, named_parameters):
    return paddle.optimizer.Adam(0.5, parameters=of(named_parameters))

def broken(learning_rate, named_parameters):
    raise KeyError("only where there is a GPU")

def chain(depth: int = 3):
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)])

class Beside(nn.Layer):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.LayerList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, 4)

class Padded(nn.Layer):
    cuts = {"words": "vocab"}

    def __init__(self, sparse: bool = False):
        super().__init__()
        self.words = nn.Embedding(32, 4, padding_idx=0, sparse=sparse)

class Table(nn.Layer):
    cuts = {"words": "vocab"}

    def __init__(self, max_norm: float | None = None, scale_grad_by_freq: bool = False):
        super().__init__()
        self.words = nn.Embedding(32, 4, max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq)

class Miscut(nn.Layer):
    cuts = {"words": "colwize"}

    def __init__(self):
        super().__init__()
        self.words = nn.Linear(4, 4)

class Misnamed(Miscut):
    cuts = {"word": "colwise"}

class Mixed(nn.Layer):
    def __init__(self):
        super().__init__()
        self.words, self.scale = nn.Linear(4, 4), self.create_parameter([4], dtype="float64")

def spectral():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(model: str, *overrides: str, loss: str = "cross_entropy") -> Recipe:
        text = small_recipe(TRAIN, model=model, dataset=TOKENS, loss=loss, strategy="hybrid")
        (tmp_path / "recipe.yaml").write_text(text)
        return read_recipe(tmp_path / "recipe.yaml", overrides)

    return write


@pytest.mark.parametrize(
    ("model", "overrides", "ranks", "said"),
    [
        (
            TEXTS,
            ["pipeline=2"],
            2,
            "ordered `blocks`, and this one names none. Legal .*: data 2; sharding 2.$",
        ),
        (TEXTS, ["tensor=2"], 2, "`cuts` tables, and this one has none. Legal .*: data 2; sharding 2.$"),
        (
            f"{TEXTS}, {CHAIN}",
            ["tensor=2"],
            2,
            "Legal .*: sharding 2; pipeline 2; data 2.$|data 2; .*pipeline 2",
        ),
        (f"{TEXTS}, cuts: {{head: colwise}}", ["tensor=2"], 2, r"tensor 2 does not divide head \(5\)"),
        (
            f"{TEXTS}, {CHAIN}",
            ["pipeline=6"],
            6,
            "6 pipeline stages need as many blocks, and the model has 5",
        ),
        (f"{TEXTS}, {CHAIN}", ["sequence=2"], 2, "names its attention in `attention_methods`"),
        ("own_models.chain", ["pipeline=4"], 4, "4 pipeline stages need as many blocks, and the model has 3"),
        (
            "own_models.Beside",
            ["pipeline=2"],
            2,
            "all of a model in its `blocks`, and 'head.bias' is in none",
        ),
        (
            "own_models.chain",
            ["pipeline=2", "partition=[1,1]"],
            2,
            "partition deals 2 blocks, and the model has 3",
        ),
    ],
)
def test_what_a_model_does_not_allow_is_said(recipe, model, overrides, ranks, said):
    found = recipe(model, *(f"strategy.{word}" for word in overrides))
    with pytest.raises(UsageError, match=said):
        found.strategy.refuse(found, ranks, "cpu")


HYBRID, DATA = "strategy.use=hybrid", "strategy.use=data_parallel"
CHAIN_OF_4 = "own_models.chain"
PARTS = [
    (
        "own_models.Padded",
        ["strategy.tensor=2", "optimizer.use=lamb"],
        "Lamb takes norms over whole parameters",
    ),
    (
        "own_models.Padded",
        ["strategy.tensor=2", "optimizer.use=muon"],
        "Muon orthogonalizes whole matrices, and each rank would see only its slices",
    ),
    (
        "own_models.Padded",
        ["strategy.tensor=2", "optimizer.use=adafactor"],
        "Adafactor takes norms over whole parameters",
    ),
    ("own_models.Padded", ["strategy.tensor=2", "optimizer.use=lars"], "Lars takes norms over whole"),
    (CHAIN_OF_4, ["strategy.sharding=2", "optimizer={use: own_models.clipped}"], "not ClipGradByNorm"),
    (CHAIN_OF_4, ["strategy.sharding=2", "optimizer={use: own_models.grouped}"], "has parameter groups"),
    ("own_models.Padded", ["strategy.tensor=2"], "a padding_idx cannot be cut by vocabulary"),
    ("own_models.Table, max_norm: 1.0", ["strategy.tensor=2"], "a max_norm cannot be cut by vocabulary"),
    (
        "own_models.Table, scale_grad_by_freq: true",
        ["strategy.tensor=2"],
        "a scale_grad_by_freq cannot be cut",
    ),
    ("own_models.Padded, sparse: true", [DATA], "Embedding with sparse=True"),
    ("own_models.Miscut", ["strategy.tensor=2"], "'colwize', of words, is no way to cut.* 'colwise'"),
    ("own_models.Misnamed", ["strategy.tensor=2"], "Misnamed has no attribute 'word'"),
    ("own_models.Mixed", [DATA], "parameter scale is float64, and others are not"),
    ("own_models.Mixed", ["strategy.use=single"], "parameter scale is float64"),
    ("own_models.Padded", [DATA, "strategy.recompute=full"], "Padded has no ordered `blocks`"),
    (
        "own_models.Padded",
        [DATA, "strategy.recompute=selective"],
        "names its attention in `attention_methods`",
    ),
    (
        CHAIN_OF_4,
        ["strategy={use: single, recompute: selective}"],
        "names its attention in `attention_methods`",
    ),
    (CHAIN_OF_4, [DATA, "optimizer={use: own_models.around}"], "LookAhead keeps another optimizer inside"),
    (CHAIN_OF_4, [DATA, "optimizer={use: paddle.optimizer.LBFGS}"], "LBFGS computes the loss several times"),
    (CHAIN_OF_4, [DATA, "optimizer={use: own_models.own_rate}"], "but has 0.5"),
    (
        CHAIN_OF_4,
        [DATA, "schedule={use: paddle.optimizer.lr.ReduceOnPlateau, learning_rate: 0.1}"],
        "ReduceOnPlateau",
    ),
    (CHAIN_OF_4, [DATA, "loss=null"], "has no method loss"),
    (
        CHAIN_OF_4,
        ["strategy.use=single", "callbacks=[{use: timeline}]"],
        "callback timeline shows the ranks' exchange",
    ),
]


@pytest.mark.parametrize(("model", "overrides", "said"), PARTS)
def test_what_every_rank_would_refuse_is_said_before(recipe, model, overrides, said):
    """By `check --ranks`, in the words of a rank."""
    from paddle_dp.verbs.check_screen import forecast

    found = recipe(model, *overrides)
    with pytest.raises(UsageError, match=said):
        list(forecast(found, 1 if "single" in overrides[0] else 2))


@pytest.mark.parametrize("optimizer", ["own_models.broken", "paddle.optimizer.Adam"])
def test_what_cannot_be_made_here_is_left_to_the_ranks(recipe, optimizer):
    found = recipe(CHAIN_OF_4, DATA, f"optimizer={{use: {optimizer}}}")
    found.strategy.refuse(found, 2, "cpu")


def test_nothing_is_drawn_or_named_by_looking(recipe):
    """The ranks ask, too, before they make the model that they train."""
    import paddle

    found = recipe(CHAIN_OF_4, "strategy.sharding=2")
    paddle.seed(1)
    before = nn_name(), paddle.get_rng_state()[0].__getstate__()
    found.strategy.refuse(found, 2, "cpu")
    assert (paddle.get_rng_state()[0].__getstate__(), nn_name() - 1) == before[::-1]


def nn_name() -> int:
    """The number in the name of the next layer."""
    from paddle import nn

    return int(nn.Linear(1, 1).full_name().rpartition("_")[2])


@pytest.mark.parametrize("model", ["own_models.chain", f"{TEXTS}, {CHAIN}", "own_models.spectral"])
def test_a_chain_needs_no_setting_called_depth(recipe, model):
    """Nor can every model be built without memory: what cannot, its ranks look at."""
    found = recipe(model, "strategy.pipeline=2")
    found.strategy.refuse(found, 2, "cpu")


def test_a_loss_without_parts_is_not_given_some(recipe):
    heads = "cuts: {head: classes}"
    found = recipe(f"{TEXTS}, {heads}", "strategy.tensor=5", loss="mean_squared_error")
    with pytest.raises(
        UsageError, match="tensor 5 cuts the classes of the scores, which this loss needs whole"
    ):
        found.strategy.refuse(found, 5, "cpu")


def test_a_pattern_that_means_nothing_has_its_line(recipe):
    with pytest.raises(
        RecipeError, match=r"recipe.yaml:2: model.cuts.encoder.layer.\*.linear1: .*Did you mean 'layers'"
    ):
        recipe(f'{TEXTS}, cuts: {{"encoder.layer.*.linear1": colwise}}')
