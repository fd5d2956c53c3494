"""Learning from given answers: supervised fine-tuning and reward models.

    repeat
        rows ~ D                        batch       data/datasets.py, learner/batches.py
        theta <- theta - lr grad L      update      learner/update.py

Each is a job of its own, and a stage before RL: the warm start, reward models without a folder.
"""

import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from jaxrl_llm.algorithms import losses
from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.checkpoint import saver
from jaxrl_llm.config import ConfigError, JobConfig, RLConfig, SFTConfig, SupervisedConfig
from jaxrl_llm.config.job import RewardModelingConfig
from jaxrl_llm.data import datasets, packing
from jaxrl_llm.data.datasets import Stream
from jaxrl_llm.data.packing import Microbatch, PackedBatch
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner import planned, predict, update
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.models import Models
from jaxrl_llm.learner.weights import Trainable
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.sharding import hosts
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.trainer.run import Run
from jaxrl_llm.types import Example, Pair

# Sequences that must be in one microbatch: an example, or the two of a pair.
Row = Sequence[Example]


class Batch(NamedTuple):
    """The rows of one update."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    mask: Bool[Array, "B T"]  # tokens that bear loss
    packed: PackedBatch


class Task(NamedTuple):
    """What one job learns: rows, and a loss over the microbatches of a batch."""

    name: str  # its metrics begin with it
    mesh: Mesh
    rows: Sequence[Row]
    loss: Callable[[Params, Microbatch, Batch], tuple[Array, Mapping[str, Array]]]


def train(config: SupervisedConfig, workdir: str | os.PathLike[str]) -> Trainable:
    """Returns a policy or a reward model after `config.trainer.num_steps` updates.

    Resumes from the last checkpoint in `workdir`, and raises, as `rl.train` does.
    """
    config = planned.of_supervised(config)
    with Run(config, workdir) as run:
        models = models_lib.of_job(config)
        task = _TASKS[type(config)](config, models)
        _check_longest(config, task)
        run.claim(models)
        params = weights_lib.initial_policy(config, models)
        if isinstance(config, RewardModelingConfig):
            params = weights_lib.scalar_from_policy(models, params, "reward")
        return learn(task, params, run)


def learn(task: Task, params: Params, run: Run) -> Trainable:
    """Returns the parameters after the updates of a job, from its last checkpoint on."""
    config = run.config
    assert isinstance(config, SupervisedConfig)
    stream = Stream(task.rows, config.seed, config.data.shuffle, config.data.num_workers)
    packer = Packer(config.microbatch_tokens, *mesh_lib.row_shards(task.mesh))
    state = weights_lib.trainable(params, config.trainer.optimizer, config.num_updates, task.mesh)
    state = run.resume(state, stream, packer)
    step_program = _update_program(config, task, state)
    for step in run.steps():
        clock = run.begin(step, state)
        batch = _batch(stream.take(config.trainer.batch_size), packer)
        run.hold()
        with clock("update") as watch, jax.set_mesh(task.mesh):
            state, of_update = step_program(state, batch)
            watch(of_update)
        numbers = {**of_update, **clock.seconds()}
        num_tokens = float(batch.lengths.sum())
        numbers["perf/total_num_tokens"] = num_tokens
        numbers["perf/throughput"] = num_tokens / (numbers["timing_s/step"] * task.mesh.size)
        run.end(step, state, numbers, {})
        if step % 50 == 1 or step == run.total:
            loss = float(of_update[f"{task.name}/loss"])
            logging.info("%s: update %d of %d, loss %.4f", task.name, step, run.total, loss)
    if skipped := run.total - int(state.num_updates):
        logging.warning(
            f"{task.name}: {skipped} of {run.total} updates were skipped, their results were not"
            " finite; lower the learning rate, or raise the optimizer's eps"
        )
    return state


def _update_program(config: SupervisedConfig, task: Task, state: Trainable):
    """Returns `(state, batch) -> (state, metrics)`, jitted; the old state is consumed."""
    shardings = jax.tree.map(lambda a: a.sharding, state), mesh_lib.replicated(task.mesh)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
    def step(state: Trainable, batch: Batch):
        return update.take_update(
            state,
            config.trainer.optimizer,
            config.num_updates,
            batch.packed,
            lambda params, microbatch: task.loss(params, microbatch, batch),
            config.model.compute_dtype,
            task.name,
        )

    return step


def _batch(rows: Sequence[Row], packer: Packer) -> Batch:
    """Returns rows as right-padded arrays, packed; sequences of a row share a packed row."""
    sequences = [example for row in rows for example in row]
    lengths = np.array([len(example.tokens) for example in sequences], np.int32)
    in_row = len(rows[0])
    longest = int(lengths.reshape(-1, in_row).sum(1).max())
    width = packing.bucket(longest, smallest=32)
    tokens = np.zeros((len(sequences), width), np.int32)
    mask = np.zeros((len(sequences), width), bool)
    for i, example in enumerate(sequences):
        tokens[i, : lengths[i]] = example.tokens
        mask[i, : lengths[i]] = example.mask
    groups = np.repeat(np.arange(len(rows)), in_row)
    together = packing.Beginnings(groups, np.zeros_like(groups), together=in_row > 1)
    packed = packer.pack(lengths, np.arange(len(lengths)), width=width, common=together)
    on_host: tuple[Any, Any, Any] = tokens, lengths, mask  # go to the devices with the program
    return Batch(*on_host, packed)


def _sft(config: JobConfig, models: Models) -> Task:
    """Returns cross-entropy of worked answers: a mean over all of their tokens in a batch."""
    most = config.max_sequence_tokens
    examples = datasets.worked_examples(config.data, models.tokenizer, "train", config.seed, most)

    def loss(params: Params, microbatch: Microbatch, batch: Batch):
        log_probs, _, _ = predict.token_statistics(
            models.policy,
            params,
            batch.tokens,
            microbatch,
            temperature=1.0,
            chunk=config.model.vocab_chunk,
            entropy="none",
        )
        log_probs = microbatch.unpacked(log_probs, batch.lengths, batch.tokens.shape[1])
        mask, denominators = microbatch.take(batch.mask), minibatch_denominators(batch.mask)
        return losses.token_cross_entropy(log_probs, mask, denominators)

    return Task("sft", models.mesh, [[example] for example in examples], loss)


def _reward_model(
    config: JobConfig, models: Models, name: str = "reward_model", costs: bool = False
) -> Task:
    """Returns Bradley and Terry's loss on the preference pairs of a model's name.

    With `costs` a high score is bad: of each pair the rejected answer gets the higher one.
    """
    pairs = datasets.preference_pairs(
        config.data, models.tokenizer, "train", config.seed, name, config.max_sequence_tokens
    )
    if costs:
        pairs = [Pair(chosen=pair.rejected, rejected=pair.chosen) for pair in pairs]

    def loss(params: Params, microbatch: Microbatch, batch: Batch):
        scores = predict.sequence_scores(
            models.value, params, batch.tokens, batch.lengths, microbatch
        )
        count = batch.tokens.shape[0]
        by_sequence = microbatch.put(jnp.zeros(count), scores)
        here = microbatch.put(jnp.zeros(count, bool), jnp.ones(scores.shape, bool))
        return losses.bradley_terry(by_sequence[0::2], by_sequence[1::2], here[0::2], count // 2)

    return Task("reward_model", models.meshes["reward"], pairs, loss)


_TASKS: Mapping[type[SupervisedConfig], Callable[[JobConfig, Models], Task]] = {
    SFTConfig: _sft,
    RewardModelingConfig: _reward_model,
}


def _longest(task: Task) -> int:
    """Returns the tokens of the longest row."""
    return max(sum(len(example.tokens) for example in row) for row in task.rows)


def _check_longest(config: SupervisedConfig, task: Task) -> None:
    longest, most = _longest(task), config.max_sequence_tokens
    budget, needed = config.microbatch_tokens, packing.bucket(longest, smallest=32)
    if longest > most:
        raise ConfigError(
            f"config.trainer.max_sequence_tokens: the longest row has {longest} tokens, more than"
            f" {most}; raise it, or leave such rows out"
        )
    if needed > budget:
        raise ConfigError(
            f"config.trainer.max_tokens_per_microbatch: {budget} cannot hold the longest row of"
            f" {longest} tokens; use at least {needed}"
        )


# Stages before RL.


def warm_start(config: RLConfig, models: Models, run: Run) -> Params:
    """Returns the policy that RL begins with: after the warm start, if there is one."""
    initial = functools.partial(weights_lib.initial_policy, config, models)
    if not config.warm_start.num_steps:
        return initial()
    abstract = weights_lib.abstract_params(models.policy, models.mesh)
    task = functools.partial(_sft, config, models)
    job = functools.partial(config.stage, config.warm_start, SFTConfig)
    return _stage(run, "warm_start", models, job, task, abstract, initial)


def reward_models(config: RLConfig, models: Models, policy: Params, run: Run) -> dict[str, Params]:
    """Returns the parameters of every reward and cost model without a folder, by name.

    Each begins as the policy with a score head of zeros, and learns from its own preference pairs.
    """
    scorers = {**config.rewards.models, **config.rewards.cost_models}
    abstract = weights_lib.abstract_params(models.value, models.meshes["reward"])
    initial = functools.partial(weights_lib.scalar_from_policy, models, policy, "reward")
    job = functools.partial(config.stage, config.preference, RewardModelingConfig)
    found = {}
    for name in (name for name, model in scorers.items() if not model.path):
        costs = name in config.rewards.cost_models
        task = functools.partial(_reward_model, config, models, name, costs)
        found[name] = _stage(run, f"reward_models/{name}", models, job, task, abstract, initial)
    return found


def _stage(
    run: Run,
    folder: str,
    models: Models,
    make_job: Callable[[int], SupervisedConfig],  # from the tokens of its longest row
    make_task: Callable[[], Task],
    abstract: Params,
    initial: Callable[[], Params],
) -> Params:
    """Returns the product of a stage, trained now from `initial()` or in an earlier start."""
    product = run.workdir / folder / "product"
    if product.exists():
        return saver.load_tree(product, abstract)[0]
    task = make_task()
    stage = make_job(_longest(task))
    _check_longest(stage, task)
    with Run(stage, product.parent, run) as inner:
        inner.claim(models)
        params = learn(task, initial(), inner).params
    saver.save_tree(product, params, {"num_steps": stage.trainer.num_steps})
    if hosts.is_first():
        shutil.rmtree(product.parent / "checkpoints")  # the product is all that RL needs of it
    return params
