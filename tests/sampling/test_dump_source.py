"""Learning from dumps: what was written is read, and a run is repeated bit for bit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recipe_settings

from jaxrl_llm.config import MetricsConfig
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.metrics import rollout_dump
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.metrics.writer import Writer
from jaxrl_llm.sampling import dump_source
from jaxrl_llm.trainer import rl
from jaxrl_llm.types import Estimates, Predictions, Prompt, Rewards, Rollouts, Weights

SMALL = {
    "trainer": {"prompts_per_step": 2, "minibatch_size": 4},
    "algorithm": {"samples_per_prompt": 2},
}


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens):
        return "".join(chr(97 + token) for token in tokens)


@pytest.fixture
def sampled():
    lengths = np.array([5, 4, 6, 4], np.int32)
    prompts = tuple(Prompt((1, 2, 3)[:n], "p", "sums", {"a": 1}, {"b": 2}, 7 + n) for n in (3, 2))
    mask = np.zeros((4, 6), bool)
    for row, begin in enumerate((3, 3, 2, 2)):
        mask[row, begin : lengths[row]] = True
    mask[2, 3] = False  # as of a tool
    noise = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    tokens = np.where(np.arange(6) < lengths[:, None], 4, 0).astype(np.int32)
    tokens[:2, :3], tokens[2:, :2] = (1, 2, 3), (1, 2)
    rollouts = Rollouts(
        tokens=tokens,
        response_mask=mask,
        rollout_log_probs=noise * mask,
        versions=mask.astype(np.int32) * 3,
        lengths=lengths,
        group_ids=np.array([0, 0, 1, 1], np.int32),
        stopped=np.array([True, False, True, True]),
        prompts=prompts,
        responses=("ee", "e", "eeee", "ee"),
    )
    scores = np.array([0.1, 1.0, 0.3, 0.0], np.float32)
    rewards = Rewards(
        scores=scores,
        terms={"answer": scores},
        weights={"answer": np.ones(4, np.float32)},
        costs=np.zeros(4, np.float32),
        baselines=scores / 3,
        details=({}, {"x": 1}, {}, {}),
        num_failures=0,
    )
    zeros = jnp.zeros((4, 6))
    predictions = Predictions(*[zeros] * len(dataclasses.fields(Predictions)))
    fields = {field.name: zeros for field in dataclasses.fields(Estimates)}
    estimates = Estimates(**{**fields, "loss_mask": jnp.asarray(mask)})
    return rollouts, rewards, predictions, estimates


@pytest.fixture
def dump(tmp_path, sampled):
    quiet = MetricsConfig(console=False, tensorboard=False, rollout_tokens=True)
    with Writer(tmp_path, quiet) as writer:
        writer.write_rollouts(
            3, *sampled[:2], lambda: rollout_dump.token_records(*sampled, tokenizer=Letters())
        )
    return tmp_path / "rollouts" / "3.jsonl"


def test_dumps_round_trip(dump, sampled):
    config = recipe_settings.config("grpo", SMALL)
    found = dump_source.DumpSource(dump_source.find_dumps([dump.parent]), config, 10)
    samples = found.next_batch(Weights({}, 0), jax.random.key(0), Clock())
    for here, there in ((samples.rollouts, sampled[0]), (samples.rewards, sampled[1])):
        for name, value in vars(there).items():
            if getattr(value, "ndim", 0) > 1:  # [B, T]: as wide as the engine would have made it
                value = np.pad(value, ((0, 0), (0, config.max_sequence_tokens - value.shape[1])))
            np.testing.assert_equal(getattr(here, name), value, err_msg=name)
    assert found.get_state() == {"dumps": 1} and found.metrics() == {"replay/step": 3.0}
    pieces = json.loads(dump.read_text().splitlines()[2])["pieces"]
    assert pieces == ["e"] * 4


def test_a_dump_whose_texts_hold_line_ends_is_read(dump, sampled):
    """JSON lines may hold U+2028 as it is, and the writer of dumps writes it so."""
    rows = [json.loads(line) for line in dump.read_text("utf-8").split("\n") if line]
    for row in rows:
        row["extra_info"] = {"text": "a\u2028b\u2029c\u0085"}
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    dump.write_text("".join(lines), "utf-8")
    config = recipe_settings.config("grpo", SMALL)
    samples = dump_source.DumpSource([dump], config, 10).next_batch(
        Weights({}, 0), jax.random.key(0), Clock()
    )
    np.testing.assert_equal(samples.rollouts.lengths, sampled[0].lengths)


def test_dumps_are_found_in_order(tmp_path):
    for step in (10, 9, 1):
        (tmp_path / f"{step}.jsonl").touch()
    steps = [path.stem for path in dump_source.find_dumps([tmp_path, tmp_path / "1.jsonl"])]
    assert steps == ["1", "9", "10", "1"]
    for path in (tmp_path / "2.jsonl", tmp_path / "absent"):
        with pytest.raises(DataError, match=r"no dump; name WORKDIR/rollouts/STEP\.jsonl"):
            dump_source.find_dumps([path])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rows: rows[1].pop("prompt_tokens"), "holds no tokens; write dumps with"),
        (lambda rows: rows.pop(), "3 sequences, but a step has 4"),
        (lambda rows: rows[0]["tokens"].append(1), "'mask' and 'tokens' differ in length"),
        (lambda rows: rows[0].update(prompt_tokens=[1] * 99), "a sequence has 101 tokens, above"),
        (lambda rows: rows[0].update(prompt_tokens=[1, 2, 12]), "the token 12 is not among the"),
        (lambda rows: rows[0].pop("terms"), r"no dump of rollouts \(KeyError: 'terms'\)"),
    ],
)
def test_a_dump_that_does_not_fit_is_refused(dump, change, message):
    rows = [json.loads(line) for line in dump.read_text().splitlines()]
    change(rows)
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=message):
        dump_source.check_dumps([dump], recipe_settings.config("grpo", SMALL), 10)


@pytest.mark.slow
def test_a_replayed_run_ends_with_the_same_weights(tmp_path):
    """It ends with the last dump, though the config asks for more steps."""
    changes = {
        **SMALL,
        **recipe_settings.UNTAUGHT,
        "metrics": {"console": False, "tensorboard": False, "rollout_tokens": True},
    }

    def config(num_steps):
        steps = {"trainer": {**SMALL["trainer"], "num_steps": num_steps}}
        return recipe_settings.config("grpo", {**changes, **steps})

    sampled = rl.train(config(2), tmp_path / "sampled")
    replayed = rl.train(config(5), tmp_path / "replayed", [tmp_path / "sampled" / "rollouts"])
    jax.tree.map(np.testing.assert_array_equal, sampled.policy, replayed.policy)
    first, again = (recipe_settings.metrics(tmp_path / name) for name in ("sampled", "replayed"))
    assert max(again) == 2 and not first[1]["training/updates_left_out"]
    for name in ("critic/score/mean", "actor/pg_loss", "training/rollout_probs_diff_mean"):
        assert [first[step][name] for step in (1, 2)] == [again[step][name] for step in (1, 2)]
