"""Two ways to split a sequence: `megatron_sp` between layers of the tensor axis, `ulysses` on a separate axis.

A model's `attention_methods` table lists the methods that mix tokens. `axes.tensor` shards weights.
"""
