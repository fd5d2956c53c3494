"""The first step of a run compiles all that later ones need, whatever the lengths are."""

import json

import numpy as np
import pytest
import recipe_settings

from jaxrl_llm.trainer import rl
from jaxrl_llm.trainer.run import TrainingRun

STEPS = 6


def prompts(folder):
    """Prompts of 2 to 30 characters, the longest of them in the last step."""
    random = np.random.default_rng(0)
    lengths = [*random.integers(2, 24, 8 * (STEPS - 1)).tolist(), *[2] * 7, 30]
    texts = ["".join(random.choice(list("0123456789+"), n)) for n in lengths]
    rows = [{"data_source": "sums", "prompt": text, "ground_truth": "7"} for text in texts]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["grpo", "ppo", "interrupted"])
def test_nothing_is_compiled_after_the_first_step(
    recipe, one_device, tmp_path, monkeypatch, compilations
):
    counts, lengths, end = [], set(), TrainingRun.end_step

    def counted(self, number, state, numbers, evaluation):
        end(self, number, state, numbers, evaluation)
        counts.append(len(compilations))
        lengths.add(float(numbers["response_length/mean"]))

    monkeypatch.setattr(TrainingRun, "end_step", counted)
    rows = prompts(tmp_path)
    changes = {
        "data": {
            "task": "files", "train_files": (rows,), "eval_files": (rows,), "shuffle": False,
            "max_prompt_tokens": 40,
        },
        # Some tokens end an answer, so that answers have any length.
        "rollout": {"max_response_tokens": 24, "stop_tokens": tuple(range(20, 28))},
        "algorithm": {"samples_per_prompt": 2},
        "trainer": {
            "num_steps": STEPS, "prompts_per_step": 8, "minibatch_size": 8,
            "max_tokens_per_microbatch": 128,
        },
        "evaluation": {"every": 3, "after": True, "num_prompts": 5},
    }  # fmt: skip
    if recipe == "interrupted":  # responses that new weights read again are longer than prompts
        changes["rollout"] = {"max_response_tokens": 72, "chunk_steps": 4}
        changes["trainer"] |= {"sampling": "async", "max_staleness": 2}
    config = recipe_settings.config(
        "ppo" if recipe == "ppo" else "grpo",
        recipe_settings.merged(recipe_settings.UNTAUGHT, changes),
    )
    rl.train(config, tmp_path / "run")
    assert len(lengths) == len(counts) == STEPS, "the steps were all alike: nothing was shown"
    assert counts[0] and compilations[counts[0] : counts[-1]] == []
