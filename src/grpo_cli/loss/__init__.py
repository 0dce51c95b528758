"""The loss of one optimizer update, composed of small pure functions.

`prepare` runs once a step: it masks sequences, turns one number a completion into one a token, and gives every token
its share of the update. `policy_loss` runs once a micro-batch: ratio, surrogate, weights, KL, sum.
"""

from grpo_cli.loss.measures import Measures
from grpo_cli.loss.objective import policy_loss, token_losses
from grpo_cli.loss.prepare import prepare
from grpo_cli.loss.surrogates import SURROGATES
from grpo_cli.loss.tokens import Reduce, Tokens

__all__ = ["SURROGATES", "Measures", "Reduce", "Tokens", "policy_loss", "prepare", "token_losses"]
