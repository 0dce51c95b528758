"""The language model: weights, logprobs and tokenizer. Importing this package imports none of it.

`network` loads a causal LM and scores with it, `attention` keeps packed sequences apart, `weights` gathers what is
sharded or wrapped, `selfcheck` compares our shortcuts with the model itself. `builtin` (models that need no hub) and
`tokenizer` import no torch.
"""
