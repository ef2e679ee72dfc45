"""Two ways to split a sequence: `megatron_sp` between layers of the tensor axis, `ulysses` on an axis of its own.

Neither cuts weights: that is `parallel.tensor`. A model's `attention_methods` table says which methods mix tokens.
"""
