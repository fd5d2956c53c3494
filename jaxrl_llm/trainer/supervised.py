"""Supervised training: fine-tuning, preferences (DPO), reward models.

    repeat
        rows ~ D                        batch       data/datasets.py, learner/objectives.py
        log pi_ref at the rows          reference   learner/objectives.py
        theta <- theta - lr grad L      update      learner/update.py

Each is a job of its own; two also run as stages before RL: the warm start, and reward models that
have no folder.
"""

import dataclasses
import functools
import os
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
from jaxrl_llm.data.streams import Rows, Stream
from jaxrl_llm.learner import job_models, layer_restacking, objectives, preferences, update
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.batches import Packer, padding_share
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.learner.objectives import Objective, Row, SupervisedBatch
from jaxrl_llm.learner.weights import Trainable
from jaxrl_llm.metrics import statistics
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.models import lora
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.planning import resolve_sizes
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.rewards import truth_checks
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.sharding import kv_store_broadcast, multihost
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.storage import files
from jaxrl_llm.trainer.evaluation import Evaluator, HeldOutLoss
from jaxrl_llm.trainer.run import TrainingRun
from jaxrl_llm.types import Weights

# By job name.
_OBJECTIVES: Mapping[str, Callable[[Any, Models], Objective]] = {
    "sft": objectives.sft,
    "dpo": preferences.dpo,
    "reward_model": objectives.reward_model,
}


Job = TypeVar("Job", bound=SupervisedConfig)


class InitialWeights(NamedTuple):
    """The initial weights of a job."""

    trained: Params
    base: Params  # base weights of adapters; empty without adapters
    reference: Params  # frozen; empty without one


# evaluate(state, completed steps, clock): metrics of held-out rows and of sampled answers
Evaluate = Callable[[Trainable, int, Clock], Mapping[str, float]]


def train(config: SupervisedConfig, workdir: str | os.PathLike[str]) -> Trainable:
    """Trains a policy or a reward model for `config.trainer.num_steps` updates and returns it.

    With LoRA its parameters are the adapters. Resumes from the last checkpoint in `workdir`, and
    raises, as `rl.train` does.
    """
    config = resolve_sizes.resolve_supervised(config, workdir)
    with TrainingRun(config, workdir) as run:
        models, objective, rows, held_out, prompts, planned_bytes = _run_checks(config)
        run.claim(models, prompts, planned_bytes=planned_bytes)
        params = weights_lib.initial_params(config, models)
        reference: Params = {}
        if config.reference_folder is not None:
            reference = weights_lib.initial_reference(config, models, params)
        trained, base = weights_lib.split_trainable(
            config, objective.network, objective.mesh, params
        )
        start = InitialWeights(trained, base, reference)
        evaluate = _make_evaluate(config, models, objective, start, held_out, prompts, run)
        return run_updates(objective, rows, start, run, evaluate)


def check(config: Job, workdir: str | os.PathLike[str]) -> Job:
    """Runs the checks of `train` without training; returns the config with all sizes resolved."""
    config = resolve_sizes.resolve_supervised(config, workdir)
    with TrainingRun(config, workdir):
        _run_checks(config)
    return config


class _CheckedJob(NamedTuple):
    """The results of the checks before a job."""

    models: Models
    objective: Objective
    rows: Rows[Row]
    held_out: Sequence[Row]
    prompts: datasets.Dataset  # held-out prompts to sample answers for
    planned_bytes: float


def _run_checks(config: SupervisedConfig) -> _CheckedJob:
    """Checks everything a job needs and reads its rows; allocates and writes nothing."""
    models = job_models.make_models(config)
    objective = _OBJECTIVES[config.job](config, models)
    weights_lib.check_rates(config, models)
    weights_lib.check_folders(config, models, [(config.reference_folder or "", models.policy)])
    rows = objective.rows("train")
    _check_longest(config, rows)
    held_out: Sequence[Row] = ()
    prompts = datasets.Dataset(())
    if config.evaluation.is_enabled and config.has_held_out:
        eval_rows = objective.rows("eval")
        assert isinstance(eval_rows, Sequence), "held-out rows are read at the start"
        held_out = eval_rows[: config.evaluation.num_prompts or None]
        _check_longest(config, held_out)
        if config.answers_prompts:
            tokenizer, seed = models.tokenizer, config.seed
            prompts = datasets.load_dataset(
                config.data, tokenizer, "eval", seed, image_processor=models.image_processor
            )
            as_rl = config.as_rl()
            rewards = as_rl.rewards
            prompts = truth_checks.without_unreadable_truths({"eval": (prompts, rewards)})["eval"]
            rewards_lib.check_rewards(rewards, prompts.prompts)
            job_models.check_stop_tokens(as_rl, models.policy.shape)
            policy_sampler.check(as_rl, models)
    return _CheckedJob(
        models,
        objective,
        rows,
        held_out,
        prompts,
        resolve_sizes.check_memory(config, mesh_lib.run_devices()),
    )


def run_updates(
    objective: Objective,
    rows: Rows[Row],
    start: InitialWeights,
    run: TrainingRun,
    evaluate: Evaluate = lambda state, step, clock: {},
) -> Trainable:
    """Runs the updates of a job from its last checkpoint; returns the trained state."""
    config, name, mesh = run.config, objective.name, objective.mesh
    stream = Stream(rows, config.seed, config.data.shuffle, config.data.num_workers)
    shards = mesh_lib.num_row_shards(mesh)
    packer = Packer(config.microbatch_tokens, *shards, stages=mesh.shape["stage"])
    optimizer = config.trainer.optimizer
    state = weights_lib.make_trainable(start.trained, optimizer, config.num_updates, mesh)
    state = run.resume(state, stream, packer)
    complete = objectives.reference_log_prob_adder(objective, start.reference)
    step_program = _update_program(config, objective, state)
    if run.should_evaluate(0):
        run.writer.write(0, evaluate(state, 0, Clock()))
    for step in run.steps():
        clock = run.begin_step(step, state)
        rows_of_batch = stream.take(config.sequences_per_update)
        batch = objective.make_batch(rows_of_batch, packer)
        batch = complete(batch, clock)
        run.commit_step()
        with clock("update") as watch, jax.set_mesh(mesh):
            state, update_metrics = step_program(state, start.base, batch)
            watch(update_metrics)
        eval_metrics = evaluate(state, step, clock) if run.should_evaluate(step) else {}
        metrics = {**update_metrics, **clock.seconds()}
        metrics |= statistics.memory_metrics(list(mesh.devices.flat), run.planned_bytes)
        metrics["perf/padding_share"] = padding_share(batch.packed)
        num_tokens = float(np.sum(batch.lengths))
        metrics["perf/total_num_tokens"] = num_tokens
        metrics["perf/throughput"] = num_tokens / (metrics["timing_s/step"] * mesh.size)
        run.end_step(step, state, metrics, eval_metrics)
        if step % 50 == 1 or step == run.total_steps:
            loss = float(kv_store_broadcast.device_get(update_metrics[f"{name}/loss"]))
            logging.info("%s: update %d of %d, loss %.4f", name, step, run.total_steps, loss)
    if num_skipped := run.total_steps - int(kv_store_broadcast.device_get(state.num_updates)):
        logging.warning(
            f"{name}: {num_skipped} of {run.total_steps} updates were skipped, their results"
            " were not"
            " finite; lower the learning rate, or raise the optimizer's eps"
        )
    return state


def _update_program(config: JobConfig, objective: Objective, state: Trainable):
    """A jitted `(state, base, batch) -> (state, metrics)`; consumes the old state."""
    shardings = jax.tree.map(lambda a: a.sharding, state), mesh_lib.replicated(objective.mesh)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
    def step(state: Trainable, base: Params, batch: SupervisedBatch):
        batch = objective.with_baselines(lora.combine_params(base, state.params), batch)
        state, update_outputs = update.optimizer_step(
            state,
            config.trainer.optimizer,
            config.num_updates,
            batch.packed,
            objective.forward_spec(batch),
            lambda params, microbatch: objective.loss(
                lora.combine_params(base, params), microbatch, batch
            ),
            config.model.compute_dtype,
            objective.name,
            merge_params=functools.partial(lora.combine_params, base),
        )
        shape = objective.network.shape
        return update.with_router_update(
            config.router, shape, state, update_outputs, objective.name
        )

    return step


def _make_evaluate(
    config: SupervisedConfig,
    models: Models,
    objective: Objective,
    start: InitialWeights,
    held_out: Sequence[Row],
    prompts: datasets.Dataset,
    run: TrainingRun,
) -> Evaluate:
    """A function that evaluates held-out rows, and samples and scores answers to `prompts`."""
    if not held_out:
        return lambda state, step, clock: {}
    mesh = objective.mesh
    shards = mesh_lib.num_row_shards(mesh)
    packer = Packer(config.microbatch_tokens, *shards, stages=mesh.shape["stage"])
    complete = objectives.reference_log_prob_adder(objective, start.reference)
    measure = HeldOutLoss(objective, held_out, config.trainer.batch_size, packer, complete)
    if not prompts:
        return lambda state, step, clock: measure(state.params, start.base, clock)
    as_rl = config.as_rl()
    sampler = policy_sampler.make_sampler(as_rl, models, start.base)
    run.callback(sampler.close)
    scorer = run.enter_context(rewards_lib.RolloutScorer(as_rl.rewards, {}))
    key = jax.random.fold_in(jax.random.key(config.seed), 2**31)
    evaluate_answers = Evaluator(as_rl, sampler, prompts, scorer.score, key)

    def evaluate(state: Trainable, step: int, clock: Clock) -> Mapping[str, float]:
        loss_metrics = measure(state.params, start.base, clock)
        # The rollout copy of the weights is made per evaluation, so its memory is free in between.
        return {
            **loss_metrics,
            **evaluate_answers(Weights(sampler.weights(state.params), step), clock),
        }

    return evaluate


def _check_longest(config: SupervisedConfig, rows: Rows[Row]) -> None:
    longest, max_tokens = objectives.longest_row(rows), config.max_sequence_tokens
    budget, row_width = config.microbatch_tokens, objectives.packed_width(rows)
    if longest > max_tokens:
        raise ConfigError(
            f"config.trainer.max_sequence_tokens: the longest row has {longest} tokens, more than"
            f" {max_tokens}; raise it, or leave such rows out"
        )
    if row_width > budget:
        raise ConfigError(
            f"config.trainer.max_tokens_per_microbatch: {budget} cannot hold the longest row of"
            f" {longest} tokens; use at least {row_width}"
        )


# Stages before RL.


def warm_start(config: RLConfig, models: Models, run: TrainingRun) -> Params:
    """The initial policy of RL: after the warm start, if the config has one."""
    initial = functools.partial(weights_lib.initial_policy, config, models)
    if not config.warm_start.num_steps:
        return initial()
    abstract = weights_lib.abstract_params(models.policy, models.mesh)
    objective = objectives.sft(config, models)
    job = functools.partial(config.stage, config.warm_start, SFTConfig)
    return _run_stage(run, "warm_start", models, job, objective, abstract, initial)


def reward_models(
    config: RLConfig, models: Models, policy: Params, run: TrainingRun
) -> dict[str, Params]:
    """Trains every reward and cost model without a folder; returns their parameters by name.

    Each starts from the policy with a zero score head and trains on its own preference pairs.
    """
    abstract = weights_lib.abstract_params(models.value, models.meshes["reward"])
    initial = functools.partial(weights_lib.scalar_head_from_policy, models, policy, "reward")
    params_by_name = {}
    for name, model_config in _reward_model_configs(config).items():
        costs = name in config.rewards.cost_models
        objective = objectives.reward_model(model_config, models, name, costs)
        job = functools.partial(model_config.stage, config.preference, RewardModelingConfig)
        folder = f"reward_models/{name}"
        params_by_name[name] = _run_stage(run, folder, models, job, objective, abstract, initial)
    return params_by_name


def check_preference_pairs(
    config: RLConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Raises DataError if a row that a reward or cost model trains on is not a pair.

    With the tokenizer, also if its chat template would drop part of the row.
    """
    for model_config in _reward_model_configs(config).values():
        if model_config.data.task == "files" and not model_config.data.stream:
            for where, row in read_rows(model_config.data.train_files):
                for dialogue in datasets.pair_of_dialogues(model_config.data, row, where):
                    if tokenizer is not None:
                        datasets.check_shown(model_config.data, tokenizer, dialogue)


def _reward_model_configs(config: RLConfig) -> dict[str, RLConfig]:
    """For each model without a folder, by name: the config with the pairs that it trains on."""
    configs = {}
    for name, model in {**config.rewards.models, **config.rewards.cost_models}.items():
        data = config.data
        if model.pairs:
            data = data.with_pairs(model.pairs, model.pairs_preset)
        if not model.path:
            configs[name] = dataclasses.replace(config, data=data)
    return configs


def _run_stage(
    run: TrainingRun,
    folder: str,
    models: Models,
    make_job: Callable[[int], SupervisedConfig],  # from the token count of its longest row
    objective: Objective,
    abstract: Params,
    initial: Callable[[], Params],
) -> Params:
    """The parameters of a stage: trained now from `initial_params()`, or read from an earlier
    start.
    """
    product = run.workdir / folder / "product"
    if saver.tree_exists(product):
        load = functools.partial(saver.load_tree, product)
        return layer_restacking.restore_restacked(load, abstract, models.policy.shape)[0]
    rows = objective.rows("train")
    stage = make_job(objectives.longest_row(rows))
    _check_longest(stage, rows)
    with TrainingRun(stage, product.parent, run) as stage_run:
        stage_run.claim(models)
        params = run_updates(objective, rows, InitialWeights(initial(), {}, {}), stage_run).params
    layers = {layer_restacking.LAYERS_KEY: layer_restacking.layers_by_stack(models.policy.shape)}
    saver.save_tree(product, params, {"num_steps": stage.trainer.num_steps, **layers})
    if multihost.is_first():
        files.remove_tree(product.parent / "checkpoints")  # RL needs only the product
    return params
