"""The names a recipe may choose from are those of the tables, and every recipe is valid."""

import dataclasses

import pytest

from jaxrl_llm.algorithms.advantages import ESTIMATORS
from jaxrl_llm.algorithms.aggregation import AGGREGATIONS
from jaxrl_llm.algorithms.kl import KL_ESTIMATORS
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES
from jaxrl_llm.algorithms.selection import SELECTIONS
from jaxrl_llm.config import AlgorithmConfig, recipes


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (ESTIMATORS, recipes.ADVANTAGES),
        (POLICY_LOSSES, recipes.POLICY_LOSSES),
        (AGGREGATIONS, recipes.AGGREGATIONS),
        ((*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS)), recipes.KL_ESTIMATORS),
    ],
)
def test_tables_hold_the_names_of_the_config(table, names):
    assert tuple(table) == names


def test_selections_belong_to_losses():
    assert set(SELECTIONS) < set(POLICY_LOSSES)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_recipe_is_valid(name):
    row = recipes.RECIPES[name]
    assert row.keys() <= {field.name for field in dataclasses.fields(AlgorithmConfig)}
    assert list(AlgorithmConfig(**row, recipe=name).problems()) == []
