"""Which part of the whole's mask a rank draws, as arithmetic; and whose call is which."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.core.dropout import Scope, install, number_blocks, within_slice
from paddle_dp.core.dropout.scope import Slice

install()

N, TOKENS, HEADS, WIDTH = 3, 8, 4, 24
WHOLE = {
    "[n, heads, t, t]": ((N, HEADS, TOKENS, TOKENS), 1),
    "[n, t, heads, head]": ((N, TOKENS, HEADS, WIDTH // HEADS), 2),
    "[n, t, width]": ((N, TOKENS, WIDTH), 2),
    "[n * heads, t, t]": ((N * HEADS, TOKENS, TOKENS), 0),
}


def positions(shape, parts):
    """Where in a whole sample each element of a rank's [n, ...] lies, in the shape of one sample's rows."""
    scope = Scope(0, 0, 0, 0, N)
    scope.slices = parts
    whole, spans = scope.locate_slice((shape[0] // N, *shape[1:]))
    return np.arange(np.prod(whole)).reshape(whole)[tuple(slice(*span) for span in spans)]


def whole_positions(shape):
    return np.arange(np.prod(shape) // N).reshape(shape[0] // N, *shape[1:])


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_are_found_in_every_form_of_attention(name, ranks):
    shape, dim = WHOLE[name]
    whole = whole_positions(shape)
    for rank, part in enumerate(np.split(whole, ranks, axis=dim)):
        held = tuple(size // ranks if d == dim else size for d, size in enumerate(shape))
        found = positions(held, {"tensor": Slice("heads", rank, ranks, (TOKENS,))})
        assert (found == part).all()


def test_attention_s_length_is_that_of_its_first_tensor_by_name_or_not():
    """Without it, weights [n, heads, t, t] would be taken for [n, t, heads, head]."""
    scope, x = Scope(0, 0, 0, 0, N), paddle.zeros([N, TOKENS, WIDTH])
    attend = within_slice(lambda *_, **__: scope.slices["tensor"].lengths, "tensor", "heads", 0, 2)
    with scope:
        assert attend(x) == attend(q=x) == attend(1.0, q=x) == (TOKENS,)
        assert attend() == ()


def test_two_axes_cut_heads_and_tokens_in_the_order_in_which_they_are_dealt():
    """Heads over the tensor axis first, tokens over the sequence axis first."""
    heads, tokens = whole_positions((N, HEADS, TOKENS, TOKENS)), whole_positions((N, TOKENS, WIDTH))
    for tensor in range(2):
        for sequence in range(2):
            both = {"tensor": Slice("heads", tensor, 2, (8,)), "sequence": Slice("heads", sequence, 2, (8,))}
            assert (positions((N, 1, TOKENS, TOKENS), both) == heads[:, [2 * tensor + sequence]]).all()
            both = {"tensor": Slice("tokens", tensor, 2), "sequence": Slice("tokens", sequence, 2)}
            first = 2 * (2 * sequence + tensor)
            assert (positions((N, 2, WIDTH), both) == tokens[:, first : first + 2]).all()
            mixed = {"tensor": Slice("colwise", tensor, 2), "sequence": Slice("tokens", sequence, 2)}
            block = tokens[:, 4 * sequence :][:, :4, 12 * tensor :][:, :, :12]
            assert (positions((N, 4, 12), mixed) == block).all()


def test_flattened_tokens_are_cut_by_rows():
    flat = whole_positions((N * TOKENS, WIDTH))
    assert (positions((N * 4, WIDTH), {"sequence": Slice("tokens", 1, 2)}) == flat[4:]).all()
    assert (positions((N * TOKENS, 12), {"tensor": Slice("colwise", 1, 2)}) == flat[:, 12:]).all()


def test_the_innermost_part_counts_and_goes_again():
    seen = []
    shards = SimpleNamespace(shape=[N, 4, WIDTH])

    def inside(x):
        seen.append(dict(scope.slices))

    heads = within_slice(inside, "tensor", "heads", 1, 2)
    block = within_slice(lambda x: (inside(x), heads(x), inside(x)), "tensor", "tokens", 1, 2)
    with Scope(0, 0, 0, 0, N) as scope:
        block(shards)
    tokens = {"tensor": Slice("tokens", 1, 2)}
    assert seen == [tokens, {"tensor": Slice("heads", 1, 2, (4, 8))}, tokens]
    assert scope.slices == {}
    inside(shards)
    block(shards)  # outside of a scope: as if nothing was there
    assert seen[3:] == [{}] * 4


def test_each_block_counts_its_calls_for_itself():
    blocks = [nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), nn.Dropout(0.5)]
    number_blocks(enumerate(blocks))
    x = paddle.ones([N, 50])
    with Scope(0, 0, 0, 0, N) as scope:
        whole = [block(x) for block in (*blocks, blocks[0])]
        nn.Dropout(0.5)(x)
        assert scope.calls == {1: 2, 2: 2, 3: 1, 0: 1}
    with Scope(0, 0, 0, 0, N):  # a stage that holds the last block alone
        assert (blocks[2](x) == whole[2]).all()
    assert (whole[0] != whole[2]).any() and (whole[0] != whole[3]).any()


def test_a_block_that_never_draws_counts_no_calls_and_any_other_does():
    """Counting takes longer than a small layer's forward. A hook of a user's may draw, and so may a subclass."""

    class Mine(nn.Linear):
        pass

    hooked = nn.ReLU()
    hooked.register_forward_post_hook(lambda layer, inputs, outputs: None)
    quiet = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.GELU())]
    counted = [Mine(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), nn.RReLU(), hooked]
    number_blocks(enumerate([*quiet, *counted]))
    assert not any(layer._forward_pre_hooks for layer in quiet)
    assert all(layer._forward_pre_hooks for layer in counted)
