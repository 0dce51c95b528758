"""The rules, imported topic by topic in the order in which findings are listed."""

# ruff: noqa: F401, I001
from grpo_cli.checks import shape
from grpo_cli.checks import batch
from grpo_cli.checks import rollout
from grpo_cli.checks import filter
from grpo_cli.checks import advantage
from grpo_cli.checks import loss
from grpo_cli.checks import kl
from grpo_cli.checks import correction
from grpo_cli.checks import reward
from grpo_cli.checks import data
from grpo_cli.checks import trainer
from grpo_cli.checks import model
from grpo_cli.checks import engines
from grpo_cli.checks import logging
from grpo_cli.checks import security
from grpo_cli.checks import beyond
