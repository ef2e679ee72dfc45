"""What is gpt's own: tied weights, learned positions, its mistakes."""

import paddle

from models.gpt import Config

SMALL = {"vocab": 20, "width": 16, "depth": 2, "heads": 4, "length": 12}


def test_tied_scores_use_the_embedding_itself(tokens):
    tied, free = Config(**SMALL, tied=True).build(), Config(**SMALL).build()
    assert len(tied.parameters()) == len(free.parameters()) - 1
    assert tied.blocks[-1].out.weight is tied.blocks[0].token.weight
    before = tied(tokens(5))
    tied.blocks[0].token.weight.set_value(tied.blocks[0].token.weight * 2)
    assert float((tied(tokens(5)) - before).abs().max()) > 1e-4
    tied(tokens(5)).sum().backward()
    optimizer = paddle.optimizer.SGD(0.1, parameters=tied.parameters())
    optimizer.step()
    assert tied.blocks[-1].out.weight is tied.blocks[0].token.weight


def test_equal_tokens_differ_by_their_positions():
    hidden = Config(**SMALL).build().blocks[0](paddle.zeros([1, 12], "int64"))
    assert len({tuple(row) for row in hidden[0].numpy()}) == 12
