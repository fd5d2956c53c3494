"""docs/algorithms.md names every choice there is, and says of each recipe what its row says."""

import pathlib
import re

import pytest

from jaxrl_llm.algorithms.requirements import loss_hyperparameters
from jaxrl_llm.config import AlgorithmConfig, recipes

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "algorithms.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL))
SOURCE = (ROOT / "jaxrl_llm" / "config" / "recipes.py").read_text()

NUMBER = re.compile(r"`(\w+)=([\d.]+)`")


def columns(text):
    """Returns the cells of the rows that begin with a name."""
    return [
        [c.strip() for c in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]


ROWS = {row[0].strip("`"): row for row in columns(SECTIONS["Recipes"])}


def test_the_table_holds_exactly_the_recipes():
    assert list(ROWS) == list(recipes.RECIPES)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_row_says_what_the_recipe_says(name):
    row = recipes.RECIPES[name]
    config = AlgorithmConfig(**row, recipe=name)
    _, paper, advantage, loss, aggregation, kl, _, line = ROWS[name]
    assert advantage.startswith(f"`{config.advantage}`")
    assert ("`group_std=False`" in advantage) == (not config.group_std)
    assert loss.startswith(f"`{config.policy_loss}`")
    args = {name: value for name, value in NUMBER.findall(loss) if not name.startswith("clip_")}
    assert args == {name: f"{value:g}" for name, value in config.loss_args.items()}
    assert aggregation == f"`{config.aggregation}`"
    assert (
        kl
        == {
            "none": "none",
            "reward": f"in the reward, `{config.kl_estimator}`, {config.kl_coef:g}",
            "loss": f"in the loss, `{config.kl_estimator}`, {config.kl_coef:g}",
        }[config.kl_in]
    )
    assert line == f"`--config.algorithm.recipe={name}`"
    (comment,) = re.findall(rf'((?:    #.*\n)+)    "{name}": dict', SOURCE)
    assert re.findall(r"\d{4}\.\d{5}", paper) == re.findall(r"\d{4}\.\d{5}", comment)


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("Advantages", recipes.ADVANTAGES),
        ("Policy losses", (*recipes.POLICY_LOSSES, *recipes.AGGREGATIONS)),
    ],
)
def test_sections_hold_every_name(section, names):
    assert tuple(row[0].strip("`") for row in columns(SECTIONS[section])) == names


@pytest.mark.parametrize("name", recipes.POLICY_LOSSES)
def test_hyperparameters_of_losses_are_those_of_their_signatures(name):
    ((_, _, cell),) = [row for row in columns(SECTIONS["Policy losses"]) if row[0] == f"`{name}`"]
    expected = {key: f"{each.default:g}" for key, each in loss_hyperparameters(name).items()}
    assert dict(NUMBER.findall(cell)) == expected


def test_every_kl_estimator_is_named():
    cells = " ".join(row[0] for row in columns(SECTIONS["KL to the reference"]))
    assert tuple(re.findall(r"`(\S+)`", cells)) == recipes.KL_ESTIMATORS


def test_links_resolve():
    for target in re.findall(r"\]\(([^)#:]+)\)", DOCUMENT):
        assert (ROOT / "docs" / target).exists(), target


def test_documented_settings_exist():
    fields = AlgorithmConfig.__dataclass_fields__
    for name in re.findall(r"--config\.algorithm\.(\w+)", DOCUMENT):
        assert name in fields
