"""Training with DeepSpeed ZeRO. Importing this package imports none of it.

`policy` is what the loop sees: a model that scores and is updated. It is made of `engine` (policy and reference behind
DeepSpeed), `optimizer` (without sharding; the learning rate) and `deepspeed_config`, which imports no torch.
"""
