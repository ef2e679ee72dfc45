"""A model whose `cuts` table has a wrong way is refused when it is placed; two ranks of a tensor axis."""

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.axes.cut_check import CutCheck
from paddle_dp.errors import UsageError
from paddle_dp.mesh import join
from paddle_dp.part import read_part
from tests.house.learners import task_of
from tests.ranks import run_ranks


class Fused(nn.Layer):
    """Attention whose fused projection lies as [3, heads, size], or with whole heads beside each other."""

    attention_methods = ("_attend",)

    def __init__(self, beside, mask=0.0):
        super().__init__()
        self.cuts, self.mask = {"qkv": "heads", "out": "rowwise"}, paddle.to_tensor([mask] + [0.0] * 15)
        self.beside, self.qkv, self.out = beside, nn.Linear(16, 48), nn.Linear(16, 16)

    def _attend(self, given):
        n, t, width = given.shape
        if self.beside:
            parts = given.reshape([n, t, width // 12, 3, 4]).unbind(3)
        else:
            parts = given.reshape([n, t, 3, width // 12, 4]).unbind(2)
        q, k, v = (part.transpose([0, 2, 1, 3]) for part in parts)
        weights = nn.functional.softmax(q @ k.transpose([0, 1, 3, 2]))
        return (weights @ v).transpose([0, 2, 1, 3]).reshape([n, t, width // 3])

    def forward(self, x):
        return self.out(self._attend(self.qkv(x))) + self.mask


class Middle(nn.Layer):
    """A chain whose `cuts` somebody else gives; `norm` in its middle needs all features, `view` reads a number."""

    def __init__(self, cuts, norm=False, view=False):
        super().__init__()
        self.cuts, self.view = cuts, view
        self.first, self.second, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 10)
        self.norm = nn.LayerNorm(32) if norm else nn.ReLU()

    def forward(self, x):
        hidden = self.norm(self.first(x))
        return self.head(self.second(hidden.reshape([-1, 6, 32]) if self.view else hidden))


class Channels(nn.Layer):
    """Convolutions over [n, channels, length]."""

    def __init__(self, cuts, groups=1):
        super().__init__()
        self.cuts = cuts
        self.first, self.norm = nn.Conv1D(6, 8, 3, padding=1), nn.BatchNorm1D(8)
        self.second = nn.Conv1D(8, 4, 3, padding=1, groups=groups)

    def forward(self, x):
        return self.second(nn.functional.relu(self.norm(self.first(x))))


BOTH = {"first": "channels", "norm": "channels"}
MODELS = {
    "heads beside each other": lambda: Fused(True),
    "parts beside each other": lambda: Fused(False),
    "heads, an infinite output": lambda: Fused(True, float("-inf")),
    "parts, an infinite output": lambda: Fused(False, float("-inf")),
    "right": lambda: Middle({"first": "colwise", "second": "rowwise"}),
    "no rows": lambda: Middle({"first": "colwise"}),
    "no columns": lambda: Middle({"second": "rowwise"}),
    "norm": lambda: Middle({"first": "colwise", "second": "rowwise"}, norm=True),
    "view": lambda: Middle({"first": "colwise", "second": "rowwise"}, view=True),
    "head": lambda: Middle({"head": "colwise"}),
    "channels": lambda: Channels({**BOTH, "second": "rowwise"}),
    "no norm": lambda: Channels({"first": "channels", "second": "rowwise"}),
    "no sum": lambda: Channels(BOTH),
    "no channels": lambda: Channels({"second": "rowwise"}),
    "groups whole": lambda: Channels({"second": "channels"}, groups=2),
    "groups summed": lambda: Channels({**BOTH, "second": "rowwise"}, groups=2),
    "no convolution": lambda: Middle({"first": "channels"}),
}


def untried(remembers):
    """What is not known of a model that is placed, whose forward changes these attributes."""
    task = task_of(
        MODELS["parts beside each other"](), samples=lambda: paddle.ones([2, 6, 16]), remembers=remembers
    )
    return read_part("strategies", {"use": "hybrid", "tensor": 2}).build(join(seed=3)).place(task).unknown


def place(cases, compared=False):
    """What is said of each model, placed on a tensor axis; "" where it is."""
    mesh, said = join(seed=3), []
    for case in cases:
        paddle.seed(3)  # cut layers have drawn on each rank for itself
        inputs = paddle.to_tensor(np.random.RandomState(0).randn(2, 6, 16).astype("float32"))
        samples = {"samples": lambda inputs=inputs: inputs, "compared": compared}
        task = task_of(MODELS[case](), lambda outputs, targets: (outputs - targets).square(), **samples)
        try:
            read_part("strategies", {"use": "hybrid", "tensor": 2}).build(mesh).place(task)
            said.append("")
        except UsageError as error:
            said.append(str(error))
    return said


def answers(fused, infinite, shapes):
    """In a rank: what the tests below ask of two."""
    return {
        "fused": place(fused),
        "infinite": place(infinite),
        "shapes": [place(shapes, compared) for compared in (False, True)],
        "untried": untried(["model.calls"]),
    }


@pytest.fixture(scope="module")
def two():
    fused = ["heads beside each other", "parts beside each other"]
    infinite = ["heads, an infinite output", "parts, an infinite output"]
    return run_ranks(answers, 2, fused, infinite, list(SAID))


def test_a_fused_projection_by_parts_is_not_cut_by_heads(two):
    """Such a run trained another model, and said that it was one process's."""
    for good, bad in (rank["fused"] for rank in two):
        assert good == ""
        assert bad.startswith(
            "strategy.tensor: cut by its `cuts` and `attention_methods`, Fused computes something else"
        )


def test_an_infinite_output_hides_no_others(two):
    """Of a masked vocabulary: every difference is below a share of infinity."""
    for good, bad in (rank["infinite"] for rank in two):
        assert good == ""
        assert "Fused computes something else: its outputs differ by up to" in bad


SLICES = "first is cut as colwise, so each rank holds [2, 6, 16] of its outputs [2, 6, 32], and"
HALF = "first is cut as channels, so each rank holds [2, 4, 16] of its outputs [2, 8, 16], and"
SAID = {
    "right": "",
    "no rows": f"{SLICES} second (Linear) got [2, 6, 16] but needs [2, 6, 32]. Cut second as rowwise, which",
    "no columns": "second (Linear) is cut as rowwise but got all of its inputs, [2, 6, 32]: rowwise follows colwise.",
    "norm": f"{SLICES} norm (LayerNorm) got [2, 6, 16] but needs [2, 6, 32]. A LayerNorm needs all of them: leave",
    "view": f"{SLICES} the forward of the model (Middle) fails on them. Between colwise and rowwise, let",
    "head": "head is cut as colwise, so each rank's model returns [2, 6, 5] of its outputs [2, 6, 10]. If these are "
    "scores of classes, cut head as classes",
    "channels": "",
    "no norm": f"{HALF} norm (BatchNorm1D) got [2, 4, 16] but needs [2, 8, 16]. Cut norm as channels, too, or",
    "no sum": f"norm{HALF[5:]} second (Conv1D) got [2, 4, 16] but needs [2, 8, 16]. Cut second as rowwise, which",
    "no channels": "second (Conv1D) is cut as rowwise but got all of its inputs, [2, 8, 16]: rowwise follows channels.",
    "groups whole": "second (Conv1D) is cut as channels but got all of them, [2, 8, 16], where it needs those that",
    "groups summed": "a convolution of several groups does not sum over all of its inputs, so that `rowwise` cannot",
    "no convolution": "`channels` is for convolutions, BatchNorms and dropouts, and Linear is none. Leave it whole,",
}


def test_a_slice_of_the_wrong_shape_is_explained_with_both_layers_and_what_to_change(two):
    """It was a matrix product whose shapes do not fit; and of cut scores verify said that a side did not run."""
    for rank in two:
        for said in rank["shapes"]:
            for case, sentence in zip(SAID, said, strict=True):
                if not SAID[case]:
                    assert sentence == ""
                else:
                    assert sentence.startswith(f"strategy.tensor: {SAID[case]}"), (case, sentence)


def test_a_failure_on_another_axis_is_not_blamed_on_the_cuts():
    """A model on a sequence axis has its `cuts`, too, and none of its layers is cut."""
    model = Middle({"first": "colwise", "second": "rowwise"})
    checks = [
        CutCheck(model, lambda: paddle.ones([2, 6, 16]), by_table=by_table) for by_table in (True, False)
    ]
    model.second.register_forward_pre_hook(lambda layer, inputs: 1 / 0)
    for check, error in zip(checks, (UsageError, ZeroDivisionError), strict=True):
        with pytest.raises(error):
            check.check(model, "strategy.sequence", [])


def test_a_comparison_that_is_left_out_is_named(two):
    """A model whose forward changes an attribute was not compared, and nobody knew."""
    for unknown in (rank["untried"] for rank in two):
        assert [text.partition(",")[0] for text in unknown] == [
            "whether Fused gives the same outputs whole and cut: each forward changes model.calls"
        ]
