"""The stages before RL learn what they are given, once: a later start reads their product."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

from jaxrl_llm.checkpoint import saver
from jaxrl_llm.checkpoint.seal import SEAL_FILE
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.config.learner import OptimizerConfig, StageConfig
from jaxrl_llm.data import datasets
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.errors import ConfigError, Interrupted
from jaxrl_llm.learner import job_models, objectives, optimizer, predict, update, weights
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.objectives import SupervisedBatch
from jaxrl_llm.learner.weights import Trainable
from jaxrl_llm.metrics.writer import Writer
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.trainer import rl, supervised
from jaxrl_llm.trainer.run import TrainingRun
from jaxrl_llm.types import Prompt, Rollouts

VALUES = {
    "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "head_size": 16},
    "data": {
        "arithmetic_terms": 2,
        "arithmetic_train_prompts": 60,
        "arithmetic_eval_prompts": 20,
        "max_prompt_tokens": 16,
        "chat_template": False,
    },
    "rollout": {"max_response_tokens": 16},
    "rewards": {"models": {"judge": {}}},
    "evaluation": {"functions": {"answer": {"function": "arithmetic"}}},
    "warm_start": {
        "num_steps": 20,
        "batch_size": 32,
        "save_every": 5,
        "optimizer": {"learning_rate": 3e-3},
    },
    "preference": {  # the learning rate falls, so that the last update is not a large one
        "num_steps": 200,
        "batch_size": 32,
        "optimizer": {"learning_rate": 2e-3, "schedule": "cosine"},
    },
    "metrics": {"tensorboard": False, "console": False},
}
CONFIG = from_config_dict(VALUES)


@pytest.fixture(scope="module")
def models():
    """On one device: eight on two cores would wait for each other."""
    return job_models.make_models(CONFIG, job_models.shared_mesh(CONFIG, jax.devices()[:1]))


def warm_start(models, workdir, config=CONFIG):
    with TrainingRun(config, workdir) as run:
        return supervised.warm_start(config, models, run)


def reward_models(models, policy, workdir, config=CONFIG):
    with TrainingRun(config, workdir) as run:
        return supervised.reward_models(config, models, policy, run)


def losses(caplog, task: str) -> list[float]:
    lines = [record.getMessage() for record in caplog.records]
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{task}: update")]


def same_bits(left, right) -> bool:
    equal = jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), left, right
    )
    return all(jax.tree.leaves(equal))


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def taught(models, tmp_path_factory):
    """A policy after its warm start, and the folder of the run."""
    workdir = tmp_path_factory.mktemp("taught")
    return warm_start(models, workdir), workdir


def test_warm_start_lowers_the_loss_and_is_read_back(models, taught, caplog):
    first, workdir = taught
    found = runs.metrics(workdir / "warm_start")
    assert list(found) == list(range(1, 21))
    # 104 tokens of equal chance cost log(104) = 4.64; the sums use 14 of them.
    assert found[1]["sft/loss"] == pytest.approx(4.64, abs=0.3)
    assert found[20]["sft/loss"] < np.log(14)
    assert names(workdir) == {"warm_start"}
    assert names(workdir / "warm_start") == {"config.json", "metrics.jsonl", "product"}
    with caplog.at_level("INFO", logger="absl"):
        again = warm_start(models, workdir)
    assert same_bits(first, again) and not losses(caplog, "sft")
    assert runs.metrics(workdir / "warm_start") == found
    assert not same_bits(first, weights.initial_policy(CONFIG, models))


@pytest.mark.parametrize("how", ["asked", pytest.param("failed", marks=pytest.mark.slow)])
def test_a_warm_start_goes_on_where_it_ended(how, models, taught, tmp_path, caplog, monkeypatch):
    """As if nothing had been: its numbers, and its product to the bit."""
    write = Writer.write

    def ending(self, step, *numbers):
        write(self, step, *numbers)
        if how == "asked" and step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "failed" and step == 14:
            raise MemoryError

    with monkeypatch.context() as patched, pytest.raises((Interrupted, MemoryError)):
        patched.setattr(Writer, "write", ending)
        warm_start(models, tmp_path)
    assert "product" not in names(tmp_path / "warm_start")
    with caplog.at_level("INFO", logger="absl"):
        params = warm_start(models, tmp_path)
    assert ("resumed after step 7" if how == "asked" else "resumed after step ") in caplog.text
    wanted, reference = taught
    assert same_bits(params, wanted)
    numbers, other = (runs.metrics(folder / "warm_start") for folder in (tmp_path, reference))
    assert list(numbers) == list(other)
    for step in other:
        assert runs.repeatable(numbers[step]) == runs.repeatable(other[step]), step
    assert names(tmp_path / "warm_start") == {"config.json", "metrics.jsonl", "product"}


def test_policy_without_warm_start_is_unchanged(models, tmp_path):
    config = dataclasses.replace(CONFIG, warm_start=StageConfig(num_steps=0))
    found = warm_start(models, tmp_path, config)
    assert same_bits(found, weights.initial_policy(config, models))
    assert not list(tmp_path.iterdir())


GRADIENT = optax.GradientTransformation(
    init=optax.tree.zeros_like,
    update=lambda gradients, state, params: (optax.tree.zeros_like(params), gradients),
)


@pytest.mark.parametrize("learns", [pytest.param("sft", marks=pytest.mark.slow), "reward_model"])
def test_the_cut_into_microbatches_does_not_matter(learns, models, monkeypatch):
    """Pairs meet in one microbatch, however small it is."""
    monkeypatch.setattr(optimizer, "make_optimizer", lambda *settings: GRADIENT)
    no_matter = OptimizerConfig(), 1
    policy = weights.initial_policy(CONFIG, models)
    if learns == "sft":
        task, params = objectives.sft(CONFIG, models), policy
    else:
        task = objectives.reward_model(CONFIG, models, "judge")
        params = weights.scalar_head_from_policy(models, policy, "reward")
        score = np.random.default_rng(0).standard_normal(params["score"].shape, np.float32)
        params = params | {"score": jnp.asarray(score)}
    found = []
    given = task.rows("train")
    for budget in (objectives.longest_row(given) // 32 * 32 + 32, 4096):
        batch = SupervisedBatch.from_rows(given[:12], Packer(budget, 1))
        role = Trainable(params, GRADIENT.init(params), jnp.int32(0))

        @jax.jit
        def step(role, batch):
            def loss(params, microbatch):
                return task.loss(params, microbatch, batch)

            read = batch.packed, task.forward_spec(batch), loss
            return update.optimizer_step(role, *no_matter, *read, "float32", learns)

        with jax.set_mesh(task.mesh):
            after, metrics = step(role, batch)
        _, rows, width = batch.packed.microbatches.segment_ids.shape
        assert rows * width <= budget
        found.append((int(batch.packed.count), after.opt_state, metrics))
    (many, got, numbers), (one, want, others) = found
    assert one == 1 < 4 <= many
    difference = float(optax.tree.norm(optax.tree.sub(got, want)))
    # float32 sums in another order, of pairs whose two gradients nearly cancel.
    assert difference <= 5e-6 * float(optax.tree.norm(want))
    assert {name: float(v) for name, v in numbers.items()} == pytest.approx(
        {name: float(v) for name, v in others.items()}, rel=2e-5, abs=1e-6
    )


@pytest.mark.slow
def test_models_without_folders_learn_from_pairs_of_their_own(models, tmp_path):
    few = StageConfig(num_steps=2, batch_size=8)
    scorers = {"models": {"judge": {}, "other": {}}, "cost_models": {"harm": {}}}
    config = dataclasses.replace(
        from_config_dict({**VALUES, "algorithm": {"recipe": "safe_rlhf"}, "rewards": scorers}),
        preference=few,
    )
    judge, other, harm = (
        objectives.reward_model(config, models, name, costs=name == "harm").rows("train")
        for name in ("judge", "other", "harm")
    )
    assert [row[0] for row in judge] == [row[0] for row in other]  # the worked answers
    assert [row[1] for row in judge] != [row[1] for row in other]
    # Of a cost the worked answer has the lower score.
    assert [row[1] for row in harm] == [row[0] for row in judge]

    policy = weights.initial_policy(config, models)
    trained = reward_models(models, policy, tmp_path, config)
    assert trained.keys() == {"judge", "other", "harm"} == names(tmp_path / "reward_models")
    for name in trained:
        folder = tmp_path / "reward_models" / name
        assert names(folder) == {"config.json", "metrics.jsonl", "product"}
        # A score of zero for everything is right about nothing yet.
        assert runs.metrics(folder)[1]["reward_model/loss"] == pytest.approx(np.log(2))
    assert not same_bits(trained["judge"]["score"], trained["other"]["score"])
    again = reward_models(models, policy, tmp_path, config)
    assert all(same_bits(trained[name], again[name]) for name in trained)


@pytest.mark.slow
def test_files_of_pairs_are_each_models_own(models, tmp_path):
    def write(name, chosen, rejected):
        path = tmp_path / name
        row = {"prompt": "1+1=", "chosen": chosen, "rejected": rejected}
        path.write_text(json.dumps(row) + "\n")
        return str(path)

    good = write("good.jsonl", "abc", "123")
    safe = write("safe.jsonl", "123", "abc")
    scorers = {"models": {"judge": {"pairs": (good,)}, "sums": {}}}
    scorers |= {"cost_models": {"harm": {"pairs": (safe,)}}}
    values = {**VALUES, "algorithm": {"recipe": "safe_rlhf"}, "rewards": scorers}
    config = dataclasses.replace(
        from_config_dict({**values, "preference": {"num_steps": 1}}),
        preference=StageConfig(num_steps=2, batch_size=1),
    )
    supervised.check_preference_pairs(config)
    policy = weights.initial_policy(config, models)
    trained = reward_models(models, policy, tmp_path, config)
    # Pairs of reward and cost are opposite, and the chosen answer of a cost is to cost less.
    assert same_bits(trained["judge"]["score"], trained["harm"]["score"])
    assert not same_bits(trained["judge"]["score"], trained["sums"]["score"])
    pathlib.Path(safe).write_text('{"prompt": "1+1="}\n')
    with pytest.raises(DataError, match=r"safe\.jsonl, row 1: .* needs the columns chosen and rej"):
        supervised.check_preference_pairs(config)
    for changes, field, message in (
        ({"data": {**VALUES["data"], "task": "stories"}}, "sums.pairs", "data.task='stories' has"),
        (
            {"rewards": {"models": {"judge": {"pairs": (good,), "path": "x"}}}},
            "judge.pairs",
            "one of",
        ),
    ):
        with pytest.raises(ConfigError, match=rf"config\.rewards\.models\.{field}: .*{message}"):
            from_config_dict({**values, "preference": {"num_steps": 1}, **changes})


def as_rollouts(sequences) -> Rollouts:
    batch = SupervisedBatch.from_rows([[sequence] for sequence in sequences], Packer(4096, 1))
    count = len(batch.lengths)
    return Rollouts(
        tokens=batch.tokens,
        response_mask=batch.mask,
        rollout_log_probs=np.zeros(batch.tokens.shape, np.float32),
        versions=np.zeros(batch.tokens.shape, np.int32),
        lengths=batch.lengths,
        group_ids=np.zeros(count, np.int32),
        stopped=np.ones(count, bool),
        prompts=(Prompt((), "", "arithmetic", "", {}, 0),),
        responses=("",) * count,
    )


@pytest.mark.slow
def test_a_reward_model_tells_right_from_wrong(models, tmp_path):
    """On its own pairs nearly always; it scores as the scorer of RL does."""
    policy = weights.initial_policy(CONFIG, models)
    trained = reward_models(models, policy, tmp_path)
    frozen = weights.load_frozen(CONFIG, models, policy, trained)
    pairs = datasets.preference_pairs(CONFIG.data, models.tokenizer, "train", CONFIG.seed, "judge")
    sequences = [example for pair in pairs for example in pair]
    with rewards_lib.RolloutScorer(CONFIG.rewards, predict.model_scorers(models, frozen)) as scorer:
        scores = scorer.score(as_rollouts(sequences)).scores.reshape(-1, 2)
    assert (scores[:, 0] > scores[:, 1]).mean() > 0.9


def test_a_damaged_product_is_refused(models, tmp_path):
    product = tmp_path / "warm_start" / "product"
    saver.save_tree(product, weights.initial_policy(CONFIG, models), {})
    seal = product / SEAL_FILE
    seal.write_text(seal.read_text()[:-1])
    with pytest.raises(saver.CheckpointError, match="remove it and run the stage again"):
        warm_start(models, tmp_path)


@pytest.mark.slow
def test_the_whole_run_as_a_function(tmp_path):
    """Reward model trained, PPO against its score, held-out answers judged by the function."""
    few = StageConfig(num_steps=2, batch_size=8, optimizer=OptimizerConfig())
    config = from_config_dict(
        {
            **VALUES,
            "algorithm": {"recipe": "ppo"},
            "trainer": {"num_steps": 2, "prompts_per_step": 8},
            "evaluation": {**VALUES["evaluation"], "num_prompts": 8, "every": 1},
        }
    )
    config = dataclasses.replace(config, warm_start=few, preference=few)
    state = rl.train(config, tmp_path / "run")
    assert int(state.policy.num_updates) == int(state.critic.num_updates) == 2
    assert names(tmp_path / "run") == {
        "config.json",
        "warm_start",
        "reward_models",
        "checkpoints",
        "metrics.jsonl",
        "goodput.jsonl",
        "rollouts",
    }
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.count("val-core/arithmetic/mean@1") == 3 and text.count("reward/judge/mean") == 2


@pytest.mark.slow
def test_a_job_whose_steps_are_all_done_says_so(tmp_path, caplog):
    settings = {name: VALUES[name] for name in ("model", "data", "metrics")}
    trainer = {"num_steps": 1, "batch_size": 8, "max_sequence_tokens": 64}
    config = from_config_dict({"job": "sft", **settings, "trainer": trainer})
    once = supervised.train(config, tmp_path)
    said = f"{tmp_path}: all 1 steps of this run are done; for more, raise trainer.num_steps"
    assert said not in caplog.messages
    again = supervised.train(config, tmp_path)
    assert said in caplog.messages
    assert same_bits(once.params, again.params)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sft", "reward_model"])
def test_a_job_on_streamed_rows_resumes_exactly(job, tmp_path):
    files = []
    for name in "ab":
        rows = [{"prompt": f"{i}+1=", "completion": name, "chosen": name} for i in range(9)]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row | {"rejected": "c"}) + "\n" for row in rows))
        files.append(str(path))
    values = {
        "job": job,
        "model": VALUES["model"],
        "metrics": VALUES["metrics"],
        "data": {
            "task": "files",
            "train_files": files,
            "train_weights": (1.0, 2.0),
            "stream": True,
            "chat_template": False,
        },
        "trainer": {"num_steps": 4, "batch_size": 4, "max_sequence_tokens": 64},
        "evaluation": {"before": False, "after": False},
        "checkpoint": {"every": 2, "keep": 2},
    }
    whole = supervised.train(from_config_dict(values), tmp_path / "run")
    found = runs.metrics(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "4")
    again = supervised.train(from_config_dict(values), tmp_path / "again")
    assert same_bits(whole.params, again.params)
    for step, numbers in runs.metrics(tmp_path / "again").items():
        assert runs.repeatable(numbers) == runs.repeatable(found[step])
