"""Config files and the command line arrive as a typed `Config`, or every problem is named."""

import functools
import json
import math
import pathlib
from typing import Any

import config_fields
import pytest

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.commands import command_line
from jaxrl_llm.commands.options import PlanOptions
from jaxrl_llm.config import AlgorithmConfig, ConfigError, RLConfig, bridge, workdir
from jaxrl_llm.config.bridge import default_config_dict, from_config_dict
from jaxrl_llm.config.recipes import RECIPES

ROOT = pathlib.Path(__file__).parents[2]
CONFIG_FILE = """
from jaxrl_llm.config.bridge import default_config_dict

def get_config():
    config = default_config_dict()
    config.rewards.functions.answer = dict(function="arithmetic", weight=2.0)
    return config
"""


def minimal(**groups: Any) -> dict[str, Any]:
    """The smallest description that is valid: it needs a reward."""
    return {"rewards": {"functions": {"answer": {"function": "arithmetic"}}}, **groups}


def problems(values: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        from_config_dict(values)
    return list(error.value.problems)


def parse(tmp_path: pathlib.Path, *words: str) -> Any:
    """The config of a file and of words on the command line."""
    (tmp_path / "run.py").write_text(CONFIG_FILE)
    return command_line.parse(PlanOptions, [f"--config={tmp_path / 'run.py'}", *words]).config


def test_entries_of_a_named_group_on_the_command_line(tmp_path):
    config = parse(tmp_path, "--config.rewards.functions.answer.weight=3")
    assert config.rewards.functions["answer"].weight == 3.0
    whole = "{'long': {'function': 'length', 'weight': 1}}"
    config = parse(tmp_path, f"--config.rewards.functions={whole}")
    assert config.rewards.functions["long"].function == "length"


@pytest.mark.parametrize(
    "typed, arrived",
    [
        ("('one',)", ("one",)),
        ("one", ("one",)),
        ("['one','two']", ("one", "two")),
        ("()", ()),
    ],
)
def test_tuples_on_the_command_line(tmp_path, typed, arrived):
    assert parse(tmp_path, f"--config.rollout.stop_strings={typed}").rollout.stop_strings == arrived


def test_unknown_keys_of_the_command_line_are_all_named(tmp_path):
    parsed = functools.partial(parse, tmp_path)

    def problems(*words):
        with pytest.raises(ConfigError) as error:
            parsed(*words)
        return error.value.problems

    # The file leaves `data_source` out.
    good = parsed("--config.seed=5", "--config.rewards.functions.answer.data_source=sums")
    answer = good.rewards.functions["answer"]
    assert good.seed == 5 and answer.data_source == "sums" and answer.weight == 2.0
    assert problems("config.seed=5", "sed", "conifg.x=1") == (
        "'config.seed=5' is no flag; did you mean --config.seed=5?",
        "'sed' is no flag; write --flag=value, --help lists the flags",
        "'conifg.x=1' is no flag; did you mean --config.x=1?",
    )
    found = problems(
        "--config.algorithm.clip_lwo=0.1",
        "--config.algoritm.clip_low=0.1",
        "--config.seed.x=1",
        "--config.rewards.functions.answr.weight=1",
        "--config.rewards.functions.answer.wait=1",
    )
    assert found[:4] == (
        "config.algorithm.clip_lwo: unknown field; did you mean 'clip_low'?",
        "config.algoritm: unknown field; did you mean 'algorithm'?",
        "config.seed.x: config.seed is int and has no fields",
        "config.rewards.functions.answr: the config file has no such entry (it has: answer);"
        " set the whole group, --config.rewards.functions=\"{'answr': {...}}\"",
    )
    assert found[4].startswith("config.rewards.functions.answer.wait: unknown field")


@pytest.mark.parametrize("recipe", RECIPES)
def test_explicit_value_beats_recipe_beats_default(recipe):
    """Explicit value, then the recipe's row, then the dataclass default, field by field."""
    values = default_config_dict()
    values.rewards.functions.answer = dict(function="arithmetic")
    values.rewards.cost_functions.cost = dict(function="length")
    values.algorithm.recipe = recipe
    values.algorithm.kl_coef = 0.125
    algorithm = from_config_dict(values).algorithm
    expected = {**vars(AlgorithmConfig()), **RECIPES[recipe], "recipe": recipe, "kl_coef": 0.125}
    assert vars(algorithm) == expected


def test_a_missing_algorithm_group_is_the_default_recipe():
    assert from_config_dict(minimal()).algorithm.kl_in == RECIPES["grpo"]["kl_in"] == "loss"


@pytest.mark.parametrize("low", [{"quantization": "int8"}, {"cache_dtype": "fp8"}], ids=str)
def test_samples_of_rounded_weights_are_corrected_for_unless_the_config_says_how(low):
    by_default = from_config_dict(minimal(rollout=low))
    assert by_default.algorithm.correction == "token" and not list(by_default.warnings())
    chosen = from_config_dict(minimal(rollout=low, algorithm={"correction": "sequence"}))
    assert chosen.algorithm.correction == "sequence"
    without = from_config_dict(minimal(rollout=low, algorithm={"correction": "none"}))
    assert without.algorithm.correction == "none"
    (warning,) = without.warnings()
    assert warning.startswith("config.algorithm.correction: 'none', nothing corrects for samples")
    # It is what the run writes, so that a resumed one repeats it.
    assert from_config_dict(bridge.to_dict(by_default)) == by_default
    wide = from_config_dict(minimal(rollout={"cache_dtype": "bfloat16"}))
    assert wide.algorithm.correction == "none" and not list(wide.warnings())


def test_a_partly_given_group_keeps_the_defaults_of_its_place():
    """The critic's learning rate differs from the default of the optimizer's class."""
    config = from_config_dict(minimal(critic={"optimizer": {"beta1": 0.5}}))
    assert (config.critic.optimizer.beta1, config.critic.optimizer.learning_rate) == (0.5, 1e-5)


def test_every_problem_is_reported_at_once():
    found = problems(
        {
            "sed": 1,
            "seed": True,
            "algorithm": {"clip_lwo": 0.1, "clip_low": 0, "dynamic_sampling": 1},
            "trainer": {"num_steps": 2.0, "epochs": 0, "optimizer": {"schedule": "cosin"}},
            "data": {"train_files": ("a", 3), "num_workers": "2"},
            "mesh": 4,
            "rollout": {"temperature": "hot", "top_p": 1},
            "rewards": {"functions": {"a": {"function": "math", "wieght": 1.0}, "b": "math"}},
            "evaluation": {"samples_per_prompt": 4},
        }
    )
    expected = [
        "config.sed: unknown field; did you mean 'seed'?",
        "config.seed: expected int, got True",
        "config.algorithm.clip_lwo: unknown field; did you mean 'clip_low'?",
        "config.algorithm.dynamic_sampling: expected bool, got 1",
        "config.trainer.num_steps: expected int, got 2.0",
        "config.trainer.optimizer.schedule: expected one of 'constant', 'cosine', 'linear',"
        " got 'cosin'; did you mean 'cosine'?",
        "config.data.train_files[1]: expected str, got 3",
        "config.data.num_workers: expected int, got '2'",
        "config.mesh: expected a group of MeshConfig fields, got 4",
        "config.rollout.temperature: expected float, got 'hot'",
        "config.rewards.functions.a.wieght: unknown field; did you mean 'weight'?",
        "config.rewards.functions.b: expected a group of RewardFunctionConfig fields, got 'math'",
        # The evaluation group could be built, so its own rules were checked too.
        "config.evaluation.samples_per_prompt: 4 greedy samples are all the same;"
        " set evaluation.temperature above 0",
    ]
    assert sorted(found) == sorted(expected)


def test_rules_within_and_between_groups_are_reported_together():
    found = problems(
        minimal(
            algorithm={"clip_low": 0.0, "samples_per_prompt": 6},
            trainer={"minibatch_size": 32, "prompts_per_step": 8, "epochs": 0},
        )
    )
    assert found == [
        "config.trainer.epochs: must be in [1, 2147483647], got 0",
        "config.algorithm.clip_low: must be in (0, 1], got 0.0",
        "config.trainer.minibatch_size: 32 does not divide the 48 sequences of a step"
        " (8 prompts x 6 samples); use 16 or 24",
    ]


def test_words_are_texts_that_the_built_in_tokenizer_can_have():
    words = ("ab", "a", "b\n", "ab")
    assert problems(minimal(model={"words": words, "tokenizer": "folder"})) == [
        "config.model.words: only the built-in tokenizer has them; leave them out with a folder",
        "config.model.words[1]: 'a' must be two printable ASCII characters or more",
        "config.model.words[2]: 'b\\n' must be two printable ASCII characters or more",
        "config.model.words[3]: 'ab' is there twice",
    ]


def test_numbers_below_one_do_not_hide_the_report():
    found = problems(minimal(algorithm={"samples_per_prompt": 0, "advantage": "gae"}))
    assert found == ["config.algorithm.samples_per_prompt: must be in [1, 65536], got 0"]


def test_an_integer_that_no_float_holds_is_out_of_range():
    with pytest.raises(ConfigError, match="learning_rate"):
        from_config_dict({"trainer": {"optimizer": {"learning_rate": 10**400}}})


@pytest.mark.parametrize("kind", ["", "cost_"])
def test_a_function_and_a_model_of_one_name_are_refused(kind):
    rewards = {
        "functions": {"answer": {"function": "gsm8k"}},
        f"{kind}functions": {"twice": {"function": "length"}},
        f"{kind}models": {"twice": {"path": "folder"}},
    }
    with pytest.raises(ConfigError, match=f"rewards.{kind}models: names used twice: twice"):
        from_config_dict({"rewards": rewards})


def test_an_unknown_recipe_is_named_once():
    found = problems(minimal(algorithm={"recipe": "gpro"}))
    assert len(found) == 1 and found[0].startswith("config.algorithm.recipe: unknown recipe 'gpro'")


def test_to_dict_is_json_and_is_undone():
    config = from_config_dict(
        minimal(
            algorithm={
                "loss_args": {"dual_clip": math.inf},
                "rejections": ("token_k1",),
                "rejection_lows": (0.5,),
                "rejection_highs": (math.inf,),
            }
        )
    )
    text = json.dumps(bridge.to_dict(config), allow_nan=False)
    assert from_config_dict(json.loads(text)) == config


def test_a_workdir_belongs_to_one_run(tmp_path):
    config = from_config_dict(minimal())
    workdir.claim_workdir(config, tmp_path / "run")
    workdir.claim_workdir(config, tmp_path / "run")
    assert workdir.load_config(tmp_path / "run") == config

    longer = from_config_dict(minimal(trainer={"num_steps": 7}, mesh={"tensor": 2}))
    workdir.claim_workdir(longer, tmp_path / "run")
    assert workdir.load_config(tmp_path / "run").trainer.num_steps == 7

    other = from_config_dict(minimal(seed=3, algorithm={"clip_low": 0.1}))
    with pytest.raises(ConfigError) as error:
        workdir.claim_workdir(other, tmp_path / "run")
    assert error.value.problems[1:] == (
        "config.algorithm.clip_low: 0.1 here, 0.2 there",
        "config.seed: 3 here, 0 there",
    )
    assert workdir.load_config(tmp_path / "run").seed == 0
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_workdir_that_is_a_file_is_named(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=rf"--workdir: {tmp_path}/file is a file; name a folder"):
        workdir.check_workdir(from_config_dict(minimal()), f"{tmp_path}/file{below}")


def test_fewer_steps_than_are_done_are_refused(tmp_path):
    config = from_config_dict(minimal(trainer={"num_steps": 7}))
    workdir.claim_workdir(config, tmp_path)
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    (tmp_path / "checkpoints" / "9" / "arrays").mkdir(parents=True)
    # Nothing is complete: no step is done.
    shorter = from_config_dict(minimal(trainer={"num_steps": 5}))
    workdir.check_workdir(shorter, tmp_path)
    assert workdir.newest_step(tmp_path) == 0
    (tmp_path / "checkpoints" / "7" / workdir.SEAL_FILE).write_text("{}")
    assert workdir.newest_step(tmp_path) == 7
    workdir.claim_workdir(config, tmp_path)
    with pytest.raises(ConfigError, match=r"num_steps: 5, but .* has done 7 steps; set it above 7"):
        workdir.claim_workdir(from_config_dict(minimal(trainer={"num_steps": 5})), tmp_path)
    assert workdir.load_config(tmp_path).trainer.num_steps == 7


def test_folder_without_a_config_is_not_overwritten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("of something else\n")
    with pytest.raises(ConfigError, match=r"holds metrics\.jsonl but no config\.json.*--workdir"):
        workdir.claim_workdir(from_config_dict(minimal()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read .*is this a run's folder"):
        workdir.load_config(tmp_path)


def test_every_resumable_field_exists():
    """A renamed field must not silently become one that forbids a resume."""
    for path in workdir.RESUMABLE:
        config_fields.value_at(RLConfig(), path)


@pytest.mark.parametrize("group", ["models", "cost_models"])
def test_a_model_without_a_folder_must_be_trained(group):
    values = {
        "data": {"task": "arithmetic"},
        "algorithm": {"recipe": "safe_rlhf"},
        "rewards": {
            "functions": {"answer": {"function": "arithmetic"}},
            "cost_functions": {"harm": {"function": "length"}},
            group: {"judge": {}},
        },
    }
    with pytest.raises(ConfigError, match=rf"config.rewards.{group}.judge.path: required"):
        from_config_dict(values)
    assert from_config_dict(values | {"preference": {"num_steps": 1}})


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("sampling", "now", "sync"),
        ("sampling", "ahead", "async"),
        ("new_weights", "finish", "drain"),
        ("new_weights", "read_again", "recompute"),
    ],
)
def test_a_value_that_was_renamed_is_refused_with_its_new_name(key, old, new):
    with pytest.raises(ConfigError) as raised:
        from_config_dict({"trainer": {key: old}})
    (problem,) = raised.value.problems
    assert problem.startswith(f"config.trainer.{key}: expected one of ")
    assert problem.endswith(f"got {old!r}; it is called {new!r}")


def test_fields_that_became_loss_arguments_are_refused_with_their_new_name(tmp_path):
    """In a config, in the `config.json` of an earlier version, and on the command line."""
    table = bridge._RENAMED_FIELDS
    old = {key.removeprefix("config.algorithm."): 1.0 for key in table}
    expected = [f"{key}: unknown field; it is called {new!r}" for key, new in table.items()]
    assert problems(minimal(algorithm=old)) == expected

    stored = bridge.to_dict(from_config_dict(minimal()))
    stored["algorithm"] |= old
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError) as error:
        workdir.load_config(tmp_path)
    assert list(error.value.problems) == expected

    (tmp_path / "run.py").write_text(CONFIG_FILE)
    assert expected[0].startswith("config.algorithm.dual_clip: unknown field; it is called 'config")
    with pytest.raises(ConfigError) as error:
        command_line.parse(
            PlanOptions, [f"--config={tmp_path / 'run.py'}", *(f"--{key}=1" for key in table)]
        )
    assert list(error.value.problems) == expected

    for name, new in table.items():
        loss = {"sapo": "sapo", "dro": "dro", "clip": "clip_cov", "kl": "kl_cov"}.get(
            name.removeprefix("config.algorithm.").partition("_")[0], "vanilla"
        )
        assert new.rpartition(".")[2] in requirements.loss_hyperparameters(loss)


def test_loss_arguments_override_those_of_the_recipe_of_the_same_loss():
    def loss_args(**algorithm):
        return dict(from_config_dict(minimal(algorithm=algorithm)).algorithm.loss_args)

    assert loss_args(recipe="dapo") == {"dual_clip": 10.0}
    assert loss_args(recipe="dapo", policy_loss="vanilla") == {"dual_clip": 10.0}
    assert loss_args(recipe="dapo", loss_args={"dual_clip": 5}) == {"dual_clip": 5.0}
    assert loss_args(recipe="dapo", loss_args={"dual_clip": None}) == {"dual_clip": 10.0}
    assert loss_args(recipe="dapo", policy_loss="sapo") == {}
    assert loss_args(recipe="grpo", policy_loss="sapo", loss_args={"tau_pos": 2}) == {
        "tau_pos": 2.0
    }
    assert problems(minimal(algorithm={"recipe": "dapo", "loss_args": 3.0})) == [
        "config.algorithm.loss_args: expected names with float values, got 3.0"
    ]
    assert problems(minimal(algorithm={"loss_args": {"tau": "x"}})) == [
        "config.algorithm.loss_args.tau: expected float, got 'x'"
    ]
