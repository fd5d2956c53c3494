"""Learning from given answers: fine-tuning, preferences (DPO), reward models.

    repeat
        rows ~ D                        batch       data/datasets.py, learner/objectives.py
        log pi_ref at the rows          reference   learner/objectives.py
        theta <- theta - lr grad L      update      learner/update.py

Each is a job of its own. Two are stages before RL: the warm start, reward models without a folder.
"""

import dataclasses
import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from absl import logging
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.checkpoint import saver
from jaxrl_llm.config import ConfigError, JobConfig, RLConfig, SFTConfig, SupervisedConfig
from jaxrl_llm.config.job import RewardModelingConfig
from jaxrl_llm.data import datasets
from jaxrl_llm.data.files import read_rows
from jaxrl_llm.data.formats import pair_of
from jaxrl_llm.data.messages import role_aliases
from jaxrl_llm.data.streams import Rows, Stream
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner import objectives, planned, stored, update
from jaxrl_llm.learner import sampler as sampler_lib
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.batches import Packer, padding_share
from jaxrl_llm.learner.models import Models
from jaxrl_llm.learner.objectives import Batch, Objective, Row
from jaxrl_llm.learner.weights import Trainable
from jaxrl_llm.metrics import statistics
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.rewards import truth_checks
from jaxrl_llm.sharding import hosts, telling
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.trainer.evaluate import Evaluator, HeldOut
from jaxrl_llm.trainer.run import Run
from jaxrl_llm.types import Weights

# By the name of the job.
_OBJECTIVES: Mapping[str, Callable[[Any, Models], Objective]] = {
    "sft": objectives.sft,
    "dpo": objectives.dpo,
    "reward_model": objectives.reward_model,
}


Job = TypeVar("Job", bound=SupervisedConfig)


class Start(NamedTuple):
    """The weights that a job begins with."""

    trained: Params
    base: Params  # what adapters are added to; empty without adapters
    reference: Params  # frozen; empty without one


# evaluate(state, completed steps, clock): numbers of held-out rows and of sampled answers
Evaluate = Callable[[Trainable, int, Clock], Mapping[str, float]]


def train(config: SupervisedConfig, workdir: str | os.PathLike[str]) -> Trainable:
    """Returns a policy or a reward model after `config.trainer.num_steps` updates.

    With LoRA its parameters are the adapters. Resumes from the last checkpoint in `workdir`, and
    raises, as `rl.train` does.
    """
    config = planned.of_supervised(config, workdir)
    with Run(config, workdir) as run:
        models, objective, rows, held_out, prompts, planned_bytes = _checked(config)
        run.claim(models, prompts, planned_bytes=planned_bytes)
        params = weights_lib.initial(config, models)
        reference: Params = {}
        if config.reference_folder is not None:
            reference = weights_lib.first_reference(config, models, params)
        given = config, objective.network, objective.mesh, params
        start = Start(*weights_lib.divided(*given), reference)
        evaluate = _evaluation(config, models, objective, start, held_out, prompts, run)
        return learn(objective, rows, start, run, evaluate)


def check(config: Job, workdir: str | os.PathLike[str]) -> Job:
    """Checks all that `train` does before it begins; returns the config with its chosen sizes."""
    config = planned.of_supervised(config, workdir)
    with Run(config, workdir):
        _checked(config)
    return config


class _Checked(NamedTuple):
    """What the checks before a job found."""

    models: Models
    objective: Objective
    rows: Rows[Row]
    held_out: Sequence[Row]
    prompts: datasets.Dataset  # held out, to be answered
    planned_bytes: float


def _checked(config: SupervisedConfig) -> _Checked:
    """Checks all that a job needs, and reads its rows; allocates and writes nothing."""
    models = models_lib.of_job(config)
    objective = _OBJECTIVES[config.job](config, models)
    weights_lib.check_folders(config, models, [(config.reference_folder or "", models.policy)])
    rows = objective.rows("train")
    _check_longest(config, rows)
    held_out: Sequence[Row] = ()
    prompts = datasets.Dataset(())
    if config.evaluation.wanted and config.has_held_out:
        of_eval = objective.rows("eval")
        assert isinstance(of_eval, Sequence), "held-out rows are read at the start"
        held_out = of_eval[: config.evaluation.num_prompts or None]
        _check_longest(config, held_out)
        if config.answers_prompts:
            tokenizer, seed = models.tokenizer, config.seed
            prompts = datasets.load_dataset(
                config.data, tokenizer, "eval", seed, pictures=models.pictures
            )
            as_rl = config.as_rl()
            rewards = as_rl.rewards
            prompts = truth_checks.readable({"eval": (prompts, rewards)})["eval"]
            rewards_lib.check(rewards, prompts.prompts)
            models_lib.check_stop_tokens(as_rl, models.policy.shape)
    return _Checked(
        models, objective, rows, held_out, prompts, planned.check(config, jax.devices())
    )


def learn(
    objective: Objective,
    rows: Rows[Row],
    start: Start,
    run: Run,
    evaluate: Evaluate = lambda state, step, clock: {},
) -> Trainable:
    """Returns the parameters after the updates of a job, from its last checkpoint on."""
    config, name, mesh = run.config, objective.name, objective.mesh
    stream = Stream(rows, config.seed, config.data.shuffle, config.data.num_workers)
    split = mesh_lib.row_shards(mesh)
    packer = Packer(config.microbatch_tokens, *split, stages=mesh.shape["stage"])
    optimizer = config.trainer.optimizer
    state = weights_lib.trainable(start.trained, optimizer, config.num_updates, mesh)
    state = run.resume(state, stream, packer)
    complete = objectives.completion(objective, start.reference)
    step_program = _update_program(config, objective, state)
    if run.evaluates(0):
        run.writer.write(0, evaluate(state, 0, Clock()))
    for step in run.steps():
        clock = run.begin(step, state)
        taken = stream.take(config.sequences_per_update)
        batch = Batch.of(taken, packer, models=objective.models)
        batch = complete(batch, clock)
        run.hold()
        with clock("update") as watch, jax.set_mesh(mesh):
            state, of_update = step_program(state, start.base, batch)
            watch(of_update)
        of_evaluation = evaluate(state, step, clock) if run.evaluates(step) else {}
        numbers = {**of_update, **clock.seconds()}
        numbers |= statistics.of_memory(list(mesh.devices.flat), run.planned_bytes)
        numbers["perf/padding_share"] = padding_share(batch.packed)
        num_tokens = float(np.sum(batch.lengths))
        numbers["perf/total_num_tokens"] = num_tokens
        numbers["perf/throughput"] = num_tokens / (numbers["timing_s/step"] * mesh.size)
        run.end(step, state, numbers, of_evaluation)
        if step % 50 == 1 or step == run.total:
            loss = float(telling.fetched(of_update[f"{name}/loss"]))
            logging.info("%s: update %d of %d, loss %.4f", name, step, run.total, loss)
    if skipped := run.total - int(telling.fetched(state.num_updates)):
        logging.warning(
            f"{name}: {skipped} of {run.total} updates were skipped, their results were not"
            " finite; lower the learning rate, or raise the optimizer's eps"
        )
    return state


def _update_program(config: JobConfig, objective: Objective, state: Trainable):
    """Returns `(state, base, batch) -> (state, metrics)`, jitted; the old state is consumed."""
    shardings = jax.tree.map(lambda a: a.sharding, state), mesh_lib.replicated(objective.mesh)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
    def step(state: Trainable, base: Params, batch: Batch):
        state, found = update.take_update(
            state,
            config.trainer.optimizer,
            config.num_updates,
            batch.packed,
            objective.reader(batch),
            lambda params, microbatch: objective.loss(lora.joined(base, params), microbatch, batch),
            config.model.compute_dtype,
            objective.name,
            whole=functools.partial(lora.joined, base),
        )
        shape = objective.network.shape
        return update.after_routers(config.router, shape, state, found, objective.name)

    return step


def _evaluation(
    config: SupervisedConfig,
    models: Models,
    objective: Objective,
    start: Start,
    held_out: Sequence[Row],
    prompts: datasets.Dataset,
    run: Run,
) -> Evaluate:
    """Returns what evaluates on held-out rows, and samples and scores answers to `prompts`."""
    if not held_out:
        return lambda state, step, clock: {}
    mesh = objective.mesh
    split = mesh_lib.row_shards(mesh)
    packer = Packer(config.microbatch_tokens, *split, stages=mesh.shape["stage"])
    complete = objectives.completion(objective, start.reference)
    measure = HeldOut(objective, held_out, config.trainer.batch_size, packer, complete)
    if not prompts:
        return lambda state, step, clock: measure(state.params, start.base, clock)
    as_rl = config.as_rl()
    sampler = sampler_lib.build(as_rl, models, start.base)
    scorer = run.enter_context(rewards_lib.Scorer(as_rl.rewards, {}))
    key = jax.random.fold_in(jax.random.key(config.seed), 2**31)
    ask = Evaluator(as_rl, sampler, prompts, scorer.score, key)

    def evaluate(state: Trainable, step: int, clock: Clock) -> Mapping[str, float]:
        found = measure(state.params, start.base, clock)
        # The copy that samples is made for each evaluation: between them its memory is free.
        return {**found, **ask(Weights(sampler.weights(state.params), step), clock)}

    return evaluate


def _check_longest(config: SupervisedConfig, rows: Rows[Row]) -> None:
    longest, most = objectives.longest(rows), config.max_sequence_tokens
    budget, needed = config.microbatch_tokens, objectives.width_of(rows)
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
    objective = objectives.sft(config, models)
    job = functools.partial(config.stage, config.warm_start, SFTConfig)
    return _stage(run, "warm_start", models, job, objective, abstract, initial)


def reward_models(config: RLConfig, models: Models, policy: Params, run: Run) -> dict[str, Params]:
    """Returns the parameters of every reward and cost model without a folder, by name.

    Each begins as the policy with a score head of zeros, and learns from its own preference pairs.
    """
    abstract = weights_lib.abstract_params(models.value, models.meshes["reward"])
    initial = functools.partial(weights_lib.scalar_from_policy, models, policy, "reward")
    found = {}
    for name, own in _with_pairs(config).items():
        costs = name in config.rewards.cost_models
        objective = objectives.reward_model(own, models, name, costs)
        job = functools.partial(own.stage, config.preference, RewardModelingConfig)
        folder = f"reward_models/{name}"
        found[name] = _stage(run, folder, models, job, objective, abstract, initial)
    return found


def check_pairs(config: RLConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Raises DataError if a row that a reward or cost model learns from is no pair.

    With the tokenizer also if its chat template would leave out something of it.
    """
    for own in _with_pairs(config).values():
        if own.data.task == "files" and not own.data.stream:
            for where, row in read_rows(own.data.train_files):
                roles = role_aliases(own.data.role_aliases)
                for dialogue in pair_of(row, where, own.data.prompt_column, roles):
                    if tokenizer is not None:
                        datasets.check_shown(own.data, tokenizer, dialogue)


def _with_pairs(config: RLConfig) -> dict[str, RLConfig]:
    """Returns, by name, each model without a folder as the config with the pairs it learns from."""
    found = {}
    for name, model in {**config.rewards.models, **config.rewards.cost_models}.items():
        data = config.data
        if model.pairs:
            data = dataclasses.replace(
                data,
                task="files",
                train_files=model.pairs,
                train_weights=(),
                last_train_weights=(),
                last_train_weights_after=0,
            )
        if not model.path:
            found[name] = dataclasses.replace(config, data=data)
    return found


def _stage(
    run: Run,
    folder: str,
    models: Models,
    make_job: Callable[[int], SupervisedConfig],  # from the tokens of its longest row
    objective: Objective,
    abstract: Params,
    initial: Callable[[], Params],
) -> Params:
    """Returns the product of a stage, trained now from `initial()` or in an earlier start."""
    product = run.workdir / folder / "product"
    if product.exists():
        load = functools.partial(saver.load_tree, product)
        return stored.restored(load, abstract, models.policy.shape)[0]
    rows = objective.rows("train")
    stage = make_job(objectives.longest(rows))
    _check_longest(stage, rows)
    with Run(stage, product.parent, run) as inner:
        inner.claim(models)
        params = learn(objective, rows, Start(initial(), {}, {}), inner).params
    layers = {stored.KEY: stored.numbers(models.policy.shape)}
    saver.save_tree(product, params, {"num_steps": stage.trainer.num_steps, **layers})
    if hosts.is_first():
        shutil.rmtree(product.parent / "checkpoints")  # the product is all that RL needs of it
    return params
