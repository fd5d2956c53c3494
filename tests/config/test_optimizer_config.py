"""What an optimizer does not go with is refused by name."""

import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.bridge import from_config_dict

REWARDS = {"functions": {"answer": {"function": "arithmetic"}}}
FREE, MUON = {"name": "schedule_free"}, {"name": "muon"}


@pytest.mark.parametrize(
    "job, settings, message",
    [
        (
            "sft",
            {"lora": {"rank": 4}, "trainer": {"optimizer": MUON}},
            r"name: 'muon' is for whole",
        ),
        ("rl", {"lora": {"rank": 4}, "trainer": {"optimizer": MUON}}, r"name: 'muon' is for whole"),
        ("rl", {"trainer": {"optimizer": FREE}}, r"trainer\.optimizer\.name: .* 'adamw' or 'muon'"),
        (
            "sft",
            {"trainer": {"optimizer": {**FREE, "schedule": "cosine"}}},
            r"optimizer\.schedule: 'cosine', but schedule_free averages",
        ),
        (
            "sft",
            {"trainer": {"optimizer": {**FREE, "moment_dtype": "int8"}}},
            r"optimizer\.moment_dtype: 'int8', but schedule_free has no first moment",
        ),
        (
            "rl",
            {"model": {"param_dtype": "bfloat16"}, "critic": {"optimizer": FREE}},
            r"critic\.optimizer\.name: 'schedule_free' averages .* more digits than bfloat16",
        ),
        (
            "sft",
            {"router": {"bias_rate": 0.1}, "trainer": {"optimizer": FREE}},
            r"trainer\.optimizer\.name: .* router\.bias_rate=0\.1 moves them",
        ),
        ("sft", {"trainer": {"optimizer": {"rates": ["embed"]}}}, r"rates\[0\]: 'embed' is not"),
        ("sft", {"trainer": {"optimizer": {"rates": ["a=1", "(=2"]}}}, r"rates\[1\]: .* regular"),
        ("sft", {"trainer": {"optimizer": {"rates": ["a=nan"]}}}, r"the factor must be in \[0"),
    ],
    ids=str,
)
def test_what_an_optimizer_does_not_go_with(job, settings, message):
    values = {"job": job, **settings, **({"rewards": REWARDS} if job == "rl" else {})}
    with pytest.raises(ConfigError, match=message):
        from_config_dict(values)


def test_critics_may_be_trained_otherwise_than_policies():
    config = from_config_dict(
        {
            "lora": {"rank": 4},
            "algorithm": {"recipe": "ppo"},
            "critic": {"optimizer": MUON},
            "rewards": REWARDS,
        }
    )
    assert config.critic.optimizer.name == "muon"
