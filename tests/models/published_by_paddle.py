"""Run by a Python that has paddlenlp, or paddleformers for "ernie4_5": makes a small model with random weights, and
writes its folder, inputs, targets, outputs, loss and gradients: `python published_by_paddle.py NAME FOLDER`.

FOLDER has their .pdparams, FOLDER/np their safetensors, and of PaddleFormers FOLDER/pt those in transformers' layout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

SMALL = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
DENSE = {**SMALL, "max_position_embeddings": 16}
TASKS = {"type_vocab_size": 4, "use_task_id": True, "task_type_vocab_size": 3}
GROUPED = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}


def made(name: str) -> Any:
    if name == "ernie4_5":
        from paddleformers.transformers.ernie4_5.configuration import Ernie4_5Config
        from paddleformers.transformers.ernie4_5.modeling import Ernie4_5ForCausalLM

        config = Ernie4_5Config(**GROUPED, head_dim=12, rope_theta=500000, rms_norm_eps=1e-5)
        config._attn_implementation = "sdpa"
        return Ernie4_5ForCausalLM(config)
    from paddlenlp import transformers as nlp

    kind, settings = {
        "ernie": (nlp.ErnieForMaskedLM, nlp.ErnieConfig(**DENSE, **TASKS)),
        "ernie relu": (nlp.ErnieForMaskedLM, nlp.ErnieConfig(**DENSE, type_vocab_size=2, hidden_act="relu")),
        "bert": (nlp.BertForMaskedLM, nlp.BertConfig(**DENSE, type_vocab_size=2)),
        "gpt": (nlp.GPTForCausalLM, nlp.GPTConfig(**DENSE)),
        "llama": (nlp.LlamaForCausalLM, nlp.LlamaConfig(**GROUPED)),
    }[name]
    return kind(settings)


def main(name: str, folder: Path) -> None:
    paddle.seed(0)
    model = made(name)
    with paddle.no_grad():
        for (
            parameter
        ) in model.parameters():  # biases begin with 0 and norms with 1, which would hide a mistake
            parameter.set_value(parameter + paddle.randn(parameter.shape) * 0.05)
    model.eval()
    model.save_pretrained(str(folder))
    model.save_pretrained(str(folder / "np"), safe_serialization=True)
    if name == "ernie4_5":
        model.save_pretrained(str(folder / "pt"), save_to_hf=True)
    draw = np.random.default_rng(1)
    inputs, targets = draw.integers(1, 32, (4, 16)), draw.integers(1, 32, (4, 16))  # without padding, token 0
    found = model(paddle.to_tensor(inputs), return_dict=True)
    loss = F.cross_entropy(found.logits.reshape([-1, 32]), paddle.to_tensor(targets.reshape(-1)))
    loss.backward()
    seen = {"inputs": inputs, "targets": targets, "outputs": found.logits.numpy(), "loss": float(loss)}
    np.savez(folder / "seen.npz", **seen)
    gradients = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    np.savez(folder / "gradients.npz", **gradients)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
