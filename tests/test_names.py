"""One name each: the YAML files of a group, the choices of its schema and the builders are the same."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from grpo_cli.advantage import ESTIMATORS
from grpo_cli.filter import FILTERS
from grpo_cli.loss import SURROGATES
from grpo_cli.loss.objective import CORRECTION_LEVELS, KL_ESTIMATORS
from grpo_cli.loss.prepare import AGGREGATIONS
from grpo_cli.options import conf_dir
from grpo_cli.schema import Advantage, Correction, Filter, Loss


def choices(section, key):
    return set(get_args(section.model_fields[key].annotation))


@pytest.mark.parametrize(
    ("group", "section", "builders"),
    [("advantage", Advantage, ESTIMATORS), ("filter", Filter, FILTERS), ("loss", Loss, SURROGATES)],
)
def test_options_of_a_group_have_one_name(group, section, builders):
    files = {path.stem for path in (Path(conf_dir()) / group).glob("*.yaml")}
    assert files == choices(section, "name") == set(builders)


@pytest.mark.parametrize(
    ("section", "key", "builders"),
    [
        (Loss, "aggregation", AGGREGATIONS),
        (Loss, "kl_estimator", KL_ESTIMATORS),
        (Correction, "level", CORRECTION_LEVELS),
    ],
)
def test_enumerated_keys_have_a_function_each(section, key, builders):
    assert choices(section, key) == set(builders)
