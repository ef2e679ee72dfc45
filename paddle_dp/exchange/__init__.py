"""The exchange of gradients during backward: detects final gradients and moves each to the ranks that sum it.

`gradient_exchange` is the contract, with the hooks that report final gradients. On CPUs `pushed_gradients` sends
segments, as messages of `mesh.messages`, to the ranks that add them up. On accelerators `bucketed_gradients` fills
`buckets` and reduces them, concurrently for different owners. A gradient may be `compressed`; `residuals` keep the
errors, and `roundings` bounds them for a proof.

`choose` has the table of who uses which; layouts with axes, branches and servers compose theirs of these parts.
"""
