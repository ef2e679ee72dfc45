"""Run by a Python that has torch, transformers and torchvision: makes a small model with random weights, and writes its
folder, inputs, targets, outputs, loss and gradients: `python published.py NAME FOLDER`."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA = {
    **SMALL,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
SMOLLM2 = {**LLAMA, "tie_word_embeddings": True, "rope_theta": 100000, "rope_interleaved": False}
ERNIE_ROPE = {"rope_type": "default", "rope_theta": 500000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 1000.0,
}  # fmt: skip


def made(name: str) -> Any:
    import torch
    import transformers as tr

    torch.manual_seed(0)
    if name == "resnet":
        from torchvision.models import resnet18

        return _shaken(resnet18(num_classes=10))
    dense = {"vocab_size": 32, "max_position_embeddings": 16}
    gpt = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    config, kind = {
        "gpt": (lambda: tr.GPT2Config(**gpt, n_inner=48), tr.GPT2LMHeadModel),
        "gpt untied": (lambda: tr.GPT2Config(**gpt, tie_word_embeddings=False), tr.GPT2LMHeadModel),
        "llama": (lambda: tr.LlamaConfig(**LLAMA), tr.LlamaForCausalLM),
        "llama tied": (
            lambda: tr.LlamaConfig(**LLAMA, rope_parameters=LLAMA3, tie_word_embeddings=True),
            tr.LlamaForCausalLM,
        ),
        "llama linear": (lambda: tr.LlamaConfig(**LLAMA, rope_parameters=LINEAR), tr.LlamaForCausalLM),
        "llama biases": (lambda: tr.LlamaConfig(**LLAMA, attention_bias=True), tr.LlamaForCausalLM),
        "smollm2": (lambda: tr.LlamaConfig(**SMOLLM2), tr.LlamaForCausalLM),
        "mistral": (
            lambda: tr.MistralConfig(**LLAMA, sliding_window=None, head_dim=12),
            tr.MistralForCausalLM,
        ),
        "qwen2": (lambda: tr.Qwen2Config(**LLAMA), tr.Qwen2ForCausalLM),
        "qwen2 tied": (
            lambda: tr.Qwen2Config(**LLAMA, tie_word_embeddings=True, sliding_window=16),
            tr.Qwen2ForCausalLM,
        ),
        "qwen3": (lambda: tr.Qwen3Config(**LLAMA, head_dim=16), tr.Qwen3ForCausalLM),
        "qwen3 biases": (
            lambda: tr.Qwen3Config(**LLAMA, head_dim=8, attention_bias=True, tie_word_embeddings=True),
            tr.Qwen3ForCausalLM,
        ),
        "ernie4_5": (
            lambda: tr.Ernie4_5Config(**LLAMA, head_dim=12, rope_parameters=ERNIE_ROPE),
            tr.Ernie4_5ForCausalLM,
        ),
        "ernie4_5 untied": (
            lambda: tr.Ernie4_5Config(**LLAMA, head_dim=8, rope_parameters=LLAMA3, tie_word_embeddings=False),
            tr.Ernie4_5ForCausalLM,
        ),
        "bert": (lambda: tr.BertConfig(**SMALL, **dense), tr.BertForMaskedLM),
        "bert untied": (
            lambda: tr.BertConfig(**SMALL, **dense, tie_word_embeddings=False),
            tr.BertForMaskedLM,
        ),
        "ernie": (
            lambda: tr.ErnieConfig(**SMALL, **dense, type_vocab_size=4, use_task_id=True),
            tr.ErnieForMaskedLM,
        ),
        "ernie relu": (
            lambda: tr.ErnieConfig(**SMALL, **dense, hidden_act="relu", tie_word_embeddings=False),
            tr.ErnieForMaskedLM,
        ),
        "vit": (
            lambda: tr.ViTConfig(**SMALL, image_size=8, patch_size=4, num_channels=1, num_labels=10),
            tr.ViTForImageClassification,
        ),
    }[name]
    return _shaken(kind(config()))


def _shaken(model: Any) -> Any:
    """Biases begin with 0 and norms with 1, which would hide a mistake."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def main(name: str, folder: Path) -> None:
    import torch

    model = made(name).eval()
    (folder / "bin").mkdir()
    (folder / "half").mkdir()
    if name == "resnet":
        with torch.no_grad():
            model.train()(torch.randn(4, 3, 48, 48))  # moves the running statistics
        inputs, targets = far_from_kinks(model)
        torch.save(model.state_dict(), folder / "resnet18.pth")
    else:
        draw = np.random.default_rng(1)
        if name == "vit":
            inputs, targets = draw.normal(size=(4, 1, 8, 8)).astype("float32"), draw.integers(0, 10, 4)
        else:
            # Without token 0: of BERT's padding transformers learns nothing.
            inputs, targets = draw.integers(1, 32, (4, 16)), draw.integers(1, 32, (4, 16))
        model.save_pretrained(folder)
        model.save_pretrained(folder / "shards", max_shard_size="20KB")
        torch.save(model.state_dict(), folder / "bin" / "pytorch_model.bin")
        half = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
        torch.save(half, folder / "half" / "pytorch_model.bin")
    double = copy.deepcopy(model).double()
    wide = inputs.astype("float64") if inputs.dtype == np.float32 else inputs
    with torch.no_grad():
        outputs = _scores(model.eval(), torch.tensor(inputs)).numpy()
        truth = _scores(double.eval(), torch.tensor(wide)).numpy()
    training = name == "resnet"  # elsewhere dropout is all that training changes
    _, rounded = gradients(model.train(training), inputs, targets)
    loss, exact = gradients(double.train(training), wide, targets)
    more = 1e-5 * max(float(np.abs(g).max()) for g in exact.values())  # others are 0 but for rounding
    compared = [(rounded[n], g) for n, g in exact.items() if np.abs(g).max() > more]
    in_norm = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in compared)
    errors = [apart(outputs, truth), in_norm, max(apart(a, b) for a, b in compared)]
    seen = {
        "inputs": inputs, "targets": targets, "outputs": outputs, "truth": truth, "loss": loss,
        "errors": errors,
    }  # fmt: skip
    np.savez(folder / "seen.npz", **seen)
    np.savez(folder / "gradients.npz", **exact)


def gradients(model: Any, inputs: Any, targets: Any) -> tuple[float, dict[str, Any]]:
    """The loss, and its gradients by parameter."""
    import torch
    import torch.nn.functional as F

    model.zero_grad()
    scores = _scores(model, torch.tensor(inputs))
    loss = F.cross_entropy(scores.reshape(-1, scores.shape[-1]), torch.tensor(targets.reshape(-1)))
    loss.backward()
    return loss.item(), {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def apart(found: Any, want: Any) -> float:
    """The largest difference, relative to the largest number."""
    return float(np.abs(found - want).max() / np.abs(want).max())


def far_from_kinks(model: Any) -> tuple[Any, Any]:
    """Images and classes for which rounding changes the sign of no ReLU's input, and no maximum of the pooling.

    There the gradient jumps: one of the million units on the other side of 0 changes a parameter's gradient by some
    percent, in torch's float32 as in anyone's. So images are drawn until the float64 inputs are further from 0 than
    twice the largest error of float32 in the same layer.
    """
    import torch

    at: list[Any] = []

    def see(layer: Any, inputs: Any, output: Any) -> None:
        if isinstance(layer, torch.nn.MaxPool2d):
            near = torch.nn.functional.unfold(inputs[0].flatten(0, 1)[:, None], 3, padding=1, stride=2)
            top = near.topk(2, dim=1).values
            # Equal zeros have no gradient.
            at.append(torch.where(top[:, 1] > 0, top[:, 0] - top[:, 1], torch.inf))
        else:
            at.append(inputs[0].clone())

    model = model.train()
    kinks = [layer for layer in model.modules() if isinstance(layer, (torch.nn.ReLU, torch.nn.MaxPool2d))]
    hooks = [layer.register_forward_hook(see) for layer in kinks]
    for layer in kinks:
        layer.inplace = False
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for seed in range(33, 1000):  # the first that does, where this was written
        draw = np.random.default_rng(seed)
        images = draw.normal(size=(4, 3, 48, 48)).astype("float32")
        inputs = []
        for dtype in (torch.float32, torch.float64):
            at.clear()
            with torch.no_grad():
                model.to(dtype)(torch.tensor(images).to(dtype))
            inputs.append([tensor.double() for tensor in at])
            model.float().load_state_dict(state)
        errors = [(rough - exact).nan_to_num(0).abs().max() for rough, exact in zip(*inputs, strict=True)]
        if all(exact.abs().min() > 2 * error for exact, error in zip(inputs[1], errors, strict=True)):
            break
    else:
        raise AssertionError("no images far from all kinks")
    for hook in hooks:
        hook.remove()
    return images, draw.integers(0, 10, 4)


def _scores(model: Any, inputs: Any) -> Any:
    found = model(inputs)
    return getattr(found, "logits", found)


def again(name: str, folder: Path, seen: Path) -> None:
    """Reads an exported folder with transformers, or a file with torchvision, and writes its outputs."""
    import torch
    from safetensors.torch import load_file

    inputs = torch.tensor(np.load(seen / "seen.npz")["inputs"])
    if name == "resnet":
        model = made(name)
        model.load_state_dict(load_file(folder / "model.safetensors"))
    else:
        model, told = type(made(name)).from_pretrained(folder, output_loading_info=True)
        left = {key: sorted(map(str, value)) for key, value in told.items() if value}
        assert not left or left == {"missing_keys": ["cls.predictions.bias"]}, left  # which no forward uses
    with torch.no_grad():
        np.save(folder / "outputs.npy", _scores(model.eval(), inputs).numpy())


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(sys.argv[1], Path(sys.argv[2]))
    else:
        again(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
