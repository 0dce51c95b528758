"""GRPO-family reinforcement learning of language models, driven by Hydra configs."""

__version__ = "0.1.0"
