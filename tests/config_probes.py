"""What a job is made of, each part from a config by the package's own code, cheaply.

`tests/config/test_keys.py` changes one key after the other and compares these parts.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import pathlib
import sys
import tempfile
import types
import zlib
from typing import ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tiny
from chat_dialogues import DROPPING

from jaxrl_llm.agents import agent_pool as agents_pool
from jaxrl_llm.agents.env_manager import EnvManager
from jaxrl_llm.agents.episode import Episode
from jaxrl_llm.algorithms import advantages, losses, selection
from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.algorithms.preference_objectives import AnswerCounts, AnswerSums, pair_objective
from jaxrl_llm.checkpoint.saver import Saver
from jaxrl_llm.config import LoraConfig, RewardsConfig, RLConfig, SFTConfig
from jaxrl_llm.config.placement import ROLES
from jaxrl_llm.data import (
    counting_task,
    datasets,
    prompt_stream,
    reasoning_gym_task,
    streams,
    tasks,
)
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import (
    batches,
    distillation,
    estimate,
    job_models,
    optimizer,
    predict,
    router_replay,
    update,
)
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.vision import trainable_encoder
from jaxrl_llm.metrics import alerts as alerts_lib
from jaxrl_llm.metrics import trackers
from jaxrl_llm.metrics import writer as writer_lib
from jaxrl_llm.metrics.timers import Clock, Profiler
from jaxrl_llm.models.architecture import architecture_from_config
from jaxrl_llm.models.moe.router import RouterOutputs
from jaxrl_llm.planning import compiled_memory
from jaxrl_llm.processes import messages, worker_pool
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.rewards import judge_client, reward_pool, truth_checks
from jaxrl_llm.rewards.reward_pool import RewardError
from jaxrl_llm.rollout import engines, episodes
from jaxrl_llm.rollout.engine.requests import EngineStatistics, Request, SamplingParams
from jaxrl_llm.rollout.vllm_engine import engine as vllm_engine
from jaxrl_llm.sampling import (
    async_schedule,
    async_source,
    episodes_in_flight,
    policy_sampler,
    source,
)
from jaxrl_llm.serving.driver import RequestRejected
from jaxrl_llm.serving.protocol import ServedModel
from jaxrl_llm.serving.sessions import harness_manager
from jaxrl_llm.sharding import device_pools
from jaxrl_llm.trainer import evaluation as evaluation_lib
from jaxrl_llm.trainer import idle_balancing, relayout_schedule, run
from jaxrl_llm.trainer import supervised as stages_lib
from jaxrl_llm.types import (
    EpisodeLog,
    Minibatch,
    Predictions,
    Prompt,
    PromptBatch,
    Rewards,
    Rollouts,
    Weights,
)

RNG = np.random.default_rng
MASK = np.arange(6) < np.array([6, 5, 3, 4])[:, None]
OPTIMIZERS = [f"{path}.optimizer" for path in ("trainer", "critic", "warm_start", "preference")]
PROMPTS = tuple(Prompt((3, 4), "1+2=", "arithmetic", "3", {}, i) for i in range(4))


class _SeenError(Exception):
    """Ends a probe with what it wanted to know."""


def captured(call, owner, name, seen=lambda *args, **named: named):
    """What `seen` makes of the arguments of `owner.name` where `call` would call it, or None."""

    def capture(*args, **named):
        raise _SeenError(seen(*args, **named))

    with mock.patch.object(owner, name, capture):
        try:
            call()
        except _SeenError as error:
            return error.args


def log_probs(seed: int):
    return np.where(MASK, -RNG(seed).gamma(1.0, 1.0, MASK.shape), 0.0).astype(np.float32)


def rollouts(prompts=PROMPTS[:2], samples=2):
    count = len(prompts) * samples
    return Rollouts(
        tokens=np.arange(6 * count, dtype=np.int32).reshape(count, 6) % 5,
        response_mask=np.resize(MASK, (count, 6)),
        rollout_log_probs=np.resize(log_probs(1), (count, 6)),
        versions=np.zeros((count, 6), np.int32),
        lengths=np.resize(MASK, (count, 6)).sum(1).astype(np.int32),
        group_ids=np.repeat(np.arange(len(prompts), dtype=np.int32), samples),
        stopped=np.arange(count) % 4 != 1,
        prompts=tuple(prompts),
        responses=("1+2=3#3",) * count,
    )


def rewards(scores):
    scores = np.asarray(scores, np.float32)
    baselines = np.full_like(scores, 0.25)
    return Rewards(
        scores,
        {"a": scores, "b": np.arange(len(scores), dtype=np.float32)},
        {"a": np.ones_like(scores), "b": np.ones_like(scores)},
        scores,
        baselines,
        ({},) * len(scores),
        0,
    )


def estimates(config: RLConfig):
    """Advantages, returns, masks and weights of a step, and what the next step begins with."""
    old, ref, entropies, squares, values, costs = (log_probs(seed) for seed in range(2, 8))
    predictions = Predictions(old, ref, entropies, jnp.exp(squares), values, costs)
    mesh = job_models.shared_mesh(config)["policy"]
    state, _ = first_state(config)
    eager = types.SimpleNamespace(
        jit=lambda f, **_: lambda *given: f(*jax.tree.map(jnp.asarray, given))
    )
    with mock.patch.object(estimate, "jax", eager):
        found, after, metrics = estimate.estimator(config, mesh)(
            state, rollouts(), rewards([1.0, 0.0, 0.5, 3.0]), predictions, Clock()
        )
    return vars(found), state.log_multiplier, after.kl_coef, after.log_multiplier, metrics


def opponents(config: RLConfig):
    """Nash-MD's advantages of a group, of which each response has several opponents."""
    algorithm = dataclasses.replace(config.algorithm, advantage="nash_md", samples_per_prompt=4)
    return advantages.estimate(
        algorithm,
        rewards=log_probs(1),
        response_mask=MASK,
        old_log_probs=log_probs(2),
        ref_log_probs=log_probs(3),
        group_ids=np.zeros(4, int),
    )


def first_state(config: RLConfig):
    """What a run begins with beside weights, and how often an optimizer was moved to the host."""
    mesh = job_models.shared_mesh(config)["policy"]
    policy = types.SimpleNamespace(lora=LoraConfig())
    meshes = dict.fromkeys(("policy", "critic"), mesh)
    models = types.SimpleNamespace(mesh=mesh, meshes=meshes, policy=policy)
    moved = mock.Mock(side_effect=lambda state: state)
    with (
        mock.patch.object(weights_lib, "scalar_head_from_policy", lambda *a: {}),
        mock.patch.object(weights_lib.device_pools, "to_host_memory", moved),
    ):
        return weights_lib.initial_state(config, models, {}), moved.call_count


def resting(config: RLConfig):
    """How often the first state is moved to the host."""
    return first_state(config)[1]


def policy_loss(config: RLConfig):
    """Loss, gradient and metrics of a policy whose update has begun."""
    algorithm, zeros = config.algorithm, Minibatch.zeros(*MASK.shape)
    advantages = np.where(MASK, RNG(9).normal(size=MASK.shape), 0.0).astype(np.float32)
    now = jnp.asarray(log_probs(2) + 0.8 * log_probs(3) + 0.5)
    batch = dataclasses.replace(
        zeros,
        loss_mask=MASK,
        response_mask=MASK,
        advantages=3.0 * advantages,
        old_log_probs=log_probs(2),
        ref_log_probs=log_probs(4),
        correction_weights=jnp.ones(MASK.shape),
    )
    chosen = selection.select(algorithm, now, batch, jax.random.key(0))
    counts = minibatch_denominators(jnp.asarray(MASK), 7.0)

    def loss(x):
        return losses.policy_objective(algorithm, x, -log_probs(5), batch, chosen, counts)

    return jax.value_and_grad(loss, has_aux=True)(now)


def lessons(config: RLConfig):
    """What teachers say of samples, and of which of them."""

    def program(config, models, teacher):
        def ask(params, tokens, packed):
            shape = *packed.microbatches.segment_ids.shape, config.distillation.num_listed
            return jnp.ones(shape, jnp.int32), jnp.zeros(shape)

        return ask

    names, shape = config.distillation.teachers, types.SimpleNamespace(vocab_size=99)
    teacher = types.SimpleNamespace(network=types.SimpleNamespace(shape=shape), params={})
    frozen = types.SimpleNamespace(teachers=dict.fromkeys(names, teacher))
    meshes = job_models.shared_mesh(config)
    models = types.SimpleNamespace(meshes=meshes, packer=batches.Packer(64, 1))
    with mock.patch.object(distillation, "scoring_program", program):
        taught = distillation.teacher_scorer(config, models, frozen)
        return taught(rollouts(), Clock()).teacher_log_probs


def distilled(config: RLConfig):
    """Advantages with what teachers say, and the loss beside that of the policy."""
    lesson = distillation.MaskedTeacherLogProbs(jnp.asarray(MASK), jnp.asarray(log_probs(3)))
    rows = dataclasses.replace(Minibatch.zeros(*MASK.shape), old_log_probs=log_probs(2))
    counts = minibatch_denominators(jnp.asarray(MASK))
    found = dict.fromkeys(("forward_kl", "jsd"), jnp.asarray(-log_probs(4)))
    given = jnp.asarray(log_probs(2)), lesson, found, counts, counts
    advised = distillation.with_distillation_reward(config, rows, lesson).advantages
    return advised, distillation.distillation_loss(config, *given)


def top_k_losses(config: RLConfig):
    """The divergence over a teacher's list."""
    lists = types.SimpleNamespace(
        teacher_tokens=np.zeros((4, 6, 1), np.int32), teacher_log_probs=log_probs(3)[..., None]
    )
    listed = jnp.stack([log_probs(2), jnp.log(-jnp.expm1(log_probs(2)))], -1)
    statistics = types.SimpleNamespace(listed_log_probs=listed)
    return distillation.top_k_divergence(config, lists, statistics)


def value_loss(config: RLConfig):
    counts = minibatch_denominators(jnp.asarray(MASK))
    three = (2.0 * log_probs(seed) for seed in (2, 3, 4))
    return losses.value_loss(config.algorithm, *three, jnp.asarray(MASK), counts)


def update_program(config: RLConfig):
    """The traced update of all learners."""
    models = job_models.make_models(config)
    state = compiled_memory.abstract_state(config, models)
    updater = update.make_updater(config, models, {}, state)
    packed = compiled_memory.abstract_packed(config, models, config.minibatch_size)
    batch, key = (
        compiled_memory.abstract_batch(config, models),
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    learners = updater.learners(state, models.mesh)
    with jax.set_mesh(models.mesh):
        return str(updater.program.trace(learners, {}, batch, packed, key, train_policy=True).jaxpr)


def router_losses(config):
    """What is learned of routers."""
    numbers = ([[3.0, 1.0]], [5.0], [2.0], [4.0], [1.0])
    routed = RouterOutputs(jnp.zeros(()), *map(jnp.array, numbers))
    value, sums = router_replay.router_loss(config.router, routed, jnp.asarray(MASK))
    moe = dataclasses.replace(config.model, family="mixtral", num_layers=1)
    bias = {"layers": {"0": {"mlp": {"router": {"selection_bias": jnp.zeros((1, 2))}}}}}
    load, skipped = routed.load, jnp.array(False)
    after = router_replay.with_balanced_biases(
        config.router, architecture_from_config(moe, 8), bias, load, skipped
    )
    return value, router_replay.router_metrics(config.router, sums["routers"]), after


def routers(config: RLConfig):
    """What is learned of routers, whose routes they follow, and what is said of missing ones."""
    try:
        said = router_replay.check_routes(config.router, rollouts())
    except router_replay.RouteError as error:
        said = str(error)
    drawn = rollouts(PROMPTS, 1)
    packed = batches.Packer(64, 1).pack_rollouts(drawn)
    first = jax.tree.map(lambda a: jnp.asarray(a[0]), packed.microbatches)
    follows = router_replay.router_inputs(config.router, first, jnp.asarray(MASK)).replays
    return router_losses(config), said, follows


def asked(config: RLConfig):
    """How an update asks the policy for log-probs."""

    def statistics(outputs, **named):
        raise _SeenError(named)

    with mock.patch.object(predict.ForwardOutputs, "token_statistics", statistics):
        try:
            update_program(config)
        except _SeenError as seen:
            return seen.args


@functools.cache
def moved(config):
    """Weights after three updates by an optimizer, and what it remembers."""
    transformation = optimizer.make_optimizer(config, 8)
    layers = {"0": {"kernel": jnp.array([[[1.0, -1.0], [2.0, 0.5]]])}}
    weights = {"w": jnp.array([1.0, -2.0]), "bias": jnp.array([3.0, -1.0]), "layers": layers}
    state, found = transformation.init(weights), []
    for size in (1e-3, 1.0, 3.0):
        gradients = jax.tree.map(lambda w, n=size: n * jnp.array([1.0, -2.0]) * w**2, weights)
        changes, state = transformation.update(gradients, state, weights)
        weights = jax.tree.map(jnp.add, weights, changes)
        found.append((weights, jax.tree.leaves(state)))
    return found, [str(leaf.dtype) for leaf in jax.tree.leaves(state)]


def optimizers(config):
    """Of the policy, of the critic and of the stages before RL."""
    of_stages = [
        config.stage(stage, SFTConfig, 64).trainer.optimizer
        for stage in (getattr(config, name, None) for name in ("warm_start", "preference"))
        if stage
    ]
    own = [config.trainer.optimizer, *([config.critic.optimizer] if of_stages else [])]
    return [moved(each) for each in (*own, *of_stages)]


def stages(config: RLConfig):
    """The jobs before RL."""
    return [config.stage(s, SFTConfig, 64) for s in (config.warm_start, config.preference)]


def pairs(config: RLConfig):
    """What reward and cost models without a folder learn from."""
    return {name: own.data for name, own in stages_lib._reward_model_configs(config).items()}


def towers(config):
    """What reads the images of a random model, and how it learns."""
    models = job_models.make_models(config)
    return (
        trainable_encoder.make_vision_encoder(config, models.policy),
        models.image_feature_cache.tower,
        models.image_processor.patches(
            models.image_processor.read(counting_task.draw_image("probe")[0], "here")
        )[0],
    )


def networks(config):
    """Networks, tokenizer, meshes and packing."""
    meshes = job_models.role_meshes(config) if isinstance(config, RLConfig) else None
    models = job_models.make_models(config, meshes)
    if isinstance(config, RLConfig):
        job_models.check_stop_tokens(config, models.policy.shape)
    others = [(config.reference_folder or "", models.policy)]
    if config.learns_from_samples:
        others = weights_lib.role_folders(config, models)
    weights_lib.check_folders(config, models, others)
    places = {
        role: (dict(mesh.shape), [device.id for device in mesh.devices.flat])
        for role, mesh in models.meshes.items()
    }
    adapters = models.policy.abstract_adapters() if config.lora.rank else {}
    merge = job_models.adapter_merger(config.lora)
    scale = getattr(merge, "keywords", {})
    policy = dataclasses.replace(models.policy, lora=None)
    return policy, models.value, places, vars(models.packer), adapters, scale, models.eos_tokens


def engine(config: RLConfig):
    """What the engine is made with, and how responses are sampled."""
    seen = {}
    with (
        mock.patch.object(engines, "Engine", lambda **k: seen.update(engine=k)),
        mock.patch.object(policy_sampler, "Resharder", lambda *a: seen.update(resharder=a[3:6])),
    ):
        models = job_models.make_models(config, job_models.role_meshes(config))
        built = policy_sampler.make_sampler(config, models, {})
    named = {name: value for name, value in seen["engine"].items() if name != "decode"}
    named["max_turn_tokens"] = built.max_turn_tokens
    named["strict_tools"] = built.strict_tools is not None
    named["grammar"] = built.grammar and built.grammar.text
    network = dataclasses.replace(named.pop("network"), lora=None)
    return network, named, seen["resharder"], episodes.sampling_params(config.rollout, (1,))


def vllm_worker(config: RLConfig):
    """What a worker of vLLM is started with, where, and how long an answer may take."""
    seen = []
    with (
        mock.patch.object(vllm_engine, "check_interpreter", lambda python: None),
        mock.patch.object(vllm_engine, "WorkerClient", lambda *arguments: seen.extend(arguments)),
    ):
        models = job_models.make_models(config, job_models.role_meshes(config))
        policy_sampler.make_sampler(config, models, {})
    settings, message = seen
    place = settings.python or settings.host_and_port
    return place, settings.timeout_s, message


def prompts(config):
    """Prompts of both splits, and the order that training takes them in."""
    tokenizer = job_models.load_tokenizer(config.model)
    splits = [
        datasets.load_dataset(config.data, tokenizer, s, config.seed) for s in ("train", "eval")
    ]
    opened = []
    grain = streams.grain.ReadOptions
    with mock.patch.object(
        streams.grain, "ReadOptions", lambda **k: opened.append(k) or grain(**k)
    ):
        order = prompt_stream.PromptIterator(splits[0], config.data, config.seed).next_batch(8)
    return [split.prompts for split in splits], order, opened


def spelled_tokens(config):
    """The tokens of a message that spells a special one."""
    tokenizer = job_models.load_tokenizer(config.model)
    return tokenizer_lib.render_prompts(tokenizer, [[{"role": "user", "content": "a<eos>"}]])


def curriculum(config):
    """What is drawn, and known, when answers are scored."""
    tokenizer = job_models.load_tokenizer(config.model)
    dataset = datasets.load_dataset(config.data, tokenizer, "train", config.seed)
    drawn = prompt_stream.PromptIterator(dataset, config.data, config.seed, config.curriculum)
    for _ in range(8):
        batch = drawn.next_batch(4).prompts
        drawn.learn(batch, [np.array([1.0, 1.0, prompt.index % 3]) for prompt in batch])
    return drawn.get_state(), drawn.metrics()


def examples(config):
    """Rows of a supervised job."""
    return _rows(config, "train")


def turns(config):
    """Sequences of a dialogue whose template drops what stands before a bar once others follow."""
    tokenizer = tokenizer_lib.character_tokenizer()
    tokenizer.chat_template = DROPPING
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "a|2"}] * 2
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "rows.jsonl")
        path.write_text(json.dumps({"messages": talk}))
        data = dataclasses.replace(config.data, task="files", train_files=(str(path),))
        return datasets.worked_examples(data, tokenizer, "train", config.seed)


def held_out(config):
    """Rows that a supervised job does not learn from."""
    return _rows(config, "eval")


def _rows(config, split):
    make = datasets.worked_examples if config.job == "sft" else datasets.preference_pairs
    return make(config.data, job_models.load_tokenizer(config.model), split, config.seed)


def sft_loss(config):
    here, counts = jnp.asarray(MASK), minibatch_denominators(jnp.asarray(MASK))
    weighs = config.weighs_by_probability
    return losses.token_cross_entropy(log_probs(2), jnp.ones(MASK.shape), here, counts, weighs)


def dpo_loss(config):
    ratios, tokens = (jnp.array([1.0, -2.0]), jnp.array([0.5, 0.25])), jnp.array([3.0, 4.0])
    sums = [AnswerSums(x, x - 5.0, tokens, x, tokens, 0 * x) for x in ratios]
    counts = AnswerCounts(2.0, 2.0, 7.0, 9.0)
    return pair_objective(config.dpo, *sums, jnp.ones(2, bool), counts)


def supervised_evaluation(config):
    """How many rows a supervised job evaluates on."""
    with tempfile.TemporaryDirectory() as folder:
        train = functools.partial(stages_lib.train, config, folder)
        return captured(train, stages_lib, "_make_evaluate", lambda *args: len(args[4]))


def supervised_batch(config):
    """The first batch of a supervised job, as its update would see it."""
    opened = []
    grain = streams.grain.ReadOptions
    take = types.SimpleNamespace(batch=None)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(stages_lib.weights_lib, "initial_params", lambda *a: {}),
        mock.patch.object(stages_lib.weights_lib, "initial_reference", lambda *a: {}),
        mock.patch.object(
            stages_lib.objectives, "reference_log_prob_adder", lambda *a: lambda b, clock: b
        ),
        mock.patch.object(stages_lib, "_make_evaluate", lambda *a: lambda *b: {}),
        mock.patch.object(stages_lib, "_update_program", lambda *a: lambda *b: take.batch(*b)),
        mock.patch.object(streams.grain, "ReadOptions", lambda **k: opened.append(k) or grain(**k)),
    ):
        train = functools.partial(stages_lib.train, config, folder)
        numbers = lambda state, base, batch: jax.tree.map(np.asarray, batch)  # noqa: E731
        return captured(train, take, "batch", numbers), opened


def supervised_loss(config):
    """What the loss of a supervised job asks the policy."""

    def statistics(**named):
        raise _SeenError(named)

    objective = stages_lib._OBJECTIVES[config.job](config, job_models.make_models(config))
    batch = types.SimpleNamespace(tokens=None)
    outputs = types.SimpleNamespace(token_statistics=statistics, microbatch=None)
    with mock.patch.object(predict.ForwardSpec, "run", lambda *args: outputs):
        try:
            objective.loss({}, None, batch)
        except _SeenError as found:
            return found.args


def examples_before_rl(config):
    tokenizer = job_models.load_tokenizer(config.model)
    return datasets.worked_examples(config.data, tokenizer, "train", config.seed)


def step(config: RLConfig):
    """Samples of a step, and how many waves they took; groups of equal scores come first."""
    waves = []

    def rollout(weights, batch, samples, key, ended=None):
        waves.append(len(batch.prompts))
        return rollouts(batch.prompts, len(samples)), EngineStatistics()

    def score(of_wave):
        unequal = len(waves) > 4
        return rewards(np.arange(len(of_wave.lengths)) * float(unequal))

    models = types.SimpleNamespace(eos_tokens=(2,), tokenizer=None)
    sampler = types.SimpleNamespace(models=models, rollout=rollout, world=None)
    stream = types.SimpleNamespace(
        next_batch=lambda count: PromptBatch(PROMPTS[:1] * count),
        learn=lambda prompts, scores: None,
    )
    asked = source.SyncSource(config, sampler, stream, score)
    taken = asked.next_batch(Weights({}, 0), jax.random.key(0), Clock())
    return waves, taken.rewards.scores, taken.rollouts.group_ids


def updates(config: RLConfig):
    """Sequences of each update of a step, and whether the first step trains the policy."""
    packer = batches.Packer(64, 1)
    drawn = rollouts(PROMPTS, 2)
    order = batches.update_order(config, len(drawn.lengths), jax.random.key(0))
    each = batches.minibatches(packer, drawn, order)
    models = types.SimpleNamespace(packer=packer, image_feature_cache=None)
    updater = update.Updater(config, models, {}, {}, {})
    trained = []

    def record(self, state, batch, packed, key, *, train_policy):
        trained.append(train_policy)
        return state, {"loss": 0.0}

    with mock.patch.object(update.Updater, "update", record):
        updater(1, None, drawn, Minibatch.zeros(8, 6), order, Clock())
    return [np.asarray(packed.is_member) for packed, _ in each], trained


class _RewardProcess:
    """In place of a process that calls reward functions."""

    made: ClassVar[list[object]] = []
    answer: ClassVar[dict[str, object]] = {}

    def __init__(self, module, visible):
        self.made.append(visible)
        self.connection, self.answers = self, [b"{}"]

    def poll(self, timeout_s=0.0):
        return bool(self.answers)

    def recv_bytes(self, max_bytes):
        return self.answers.pop()

    def send_bytes(self, data):
        self.made.append(data)
        request = messages.from_json_text(data)
        if isinstance(request, dict):
            answer = {**self.answer, "number": request["number"]}
            self.answers.append(messages.to_json_text(answer).encode())

    def close(self):
        pass

    def end(self, patience_s):
        pass


def _asked(where, make_pool, *args, count, cores, **settings):
    raise _SeenError(where, count, cores)


def scores(config: RLConfig):
    """Scores and costs of some responses, and the processes that they are asked of."""
    found = []
    log = EpisodeLog(environment="NAME", reward=1.0)
    of_wave = dataclasses.replace(
        rollouts(), episode_logs=(log,) * 4 * bool(config.agent.environments)
    )
    answers = {"score": 2.0, "details": {}}, {"error": "no"}
    for wanted, answer in itertools.product((config.rewards, config.evaluation_rewards), answers):
        models = {name: lambda r: np.ones(len(r.lengths)) for name in _models(wanted)}
        worker = type("_RewardProcess", (_RewardProcess,), {"made": [], "answer": answer})

        def wait(connections, timeout_s, made=worker.made):
            made.append(timeout_s)
            return connections

        with (
            mock.patch.object(reward_pool, "ChildProcess", worker),
            mock.patch.object(reward_pool, "POLL_INTERVAL_S", math.inf),
            mock.patch.object(worker_pool, "wait", wait),
            mock.patch.object(worker_pool.time, "monotonic", lambda: 0.0),
            mock.patch.object(reward_pool, "RayWorkerPool", _asked),
        ):
            try:
                given = wanted, models, (), bool(config.agent.environments)
                with rewards_lib.RolloutScorer(*given) as scorer:
                    found.append((worker.made, vars(scorer.score(of_wave))))
            except (RewardError, _SeenError) as error:
                found.append((worker.made, str(error)))
    return found


def readable_truths(config: RLConfig):
    """What becomes of rows of which one has no ground truth."""
    rows = PROMPTS[0], dataclasses.replace(PROMPTS[1], ground_truth=None)
    try:
        found = truth_checks.without_unreadable_truths(
            {"train": (datasets.Dataset(rows), config.rewards)}
        )
    except RewardError as error:
        return str(error)
    return found["train"].prompts


def agents(config: RLConfig):
    """What processes of tools are told, and what becomes of some turns of an episode."""
    told = []
    add = {"type": "function", "function": {"name": "add", "parameters": {}}}

    class Child:
        def __init__(self, module, visible):
            told.append(visible)
            self.connection = types.SimpleNamespace(
                send_bytes=told.append,
                poll=lambda patience: True,
                recv_bytes=lambda most: b"{}",
                close=lambda: None,
            )

        def end(self, patience_s):
            pass

    def fork(pool):
        connection = types.SimpleNamespace(send_bytes=told.append, close=lambda: None)
        return agents_pool._ForkedProcess(connection, os.open(os.devnull, os.O_WRONLY))

    settings = config.agent
    if settings.ray_workers:
        try:
            with mock.patch.object(agents_pool, "RayWorkerPool", _asked):
                EnvManager(settings, tokenizer_lib.character_tokenizer())
        except _SeenError as seen:
            return seen.args
    described = {
        "tools": {name: [add] for name in settings.tools[:1]},
        "environments": {name: [] for name in settings.environments},
    }
    described["tools"] |= {name: [] for name in settings.tools[1:]}
    with (
        mock.patch.object(agents_pool, "ChildProcess", Child),
        mock.patch.object(agents_pool.AgentPool, "describe", lambda self: described),
        mock.patch.object(agents_pool.AgentPool, "_fork", fork),
        mock.patch.object(worker_pool.time, "monotonic", lambda: 0.0),
        EnvManager(settings, tokenizer_lib.character_tokenizer()) as world,
    ):
        for number in range(3):
            world._pool.ask(number, {"do": "start"}, {"do": "call"})
        deadlines = [process.deadline for process in world._pool._workers]
        own = Episode(world._context, PROMPTS[0], 0)
        call = '{"name": "add", "parameters": {}}'
        turns = []
        for _ in range(3):
            text = "; ".join([call] * 3)
            goes_on = own.record_turn(tokenizer_lib.character_tokenizer()(text)["input_ids"], True)
            talk, asked = own.ask_step(), 0
            try:
                talk.send(None)
                while True:
                    asked += 1
                    talk.send({"text": "0123456789" * 400, "seconds": 2.0, "messages": []})
            except StopIteration as end:
                outcome = {"messages": [], "done": False, "reward": 0.0, **end.value}
            turns.append((goes_on, asked, outcome["messages"], own.observe(outcome)))
        return told, deadlines, turns, own.environment


def sessions(config: RLConfig):
    """The requests that a session accepts, and the reward of a harness that failed."""
    served = ServedModel("m", tokenizer_lib.character_tokenizer(), (1,), 104, 64)
    pool = types.SimpleNamespace(close=lambda: None, ask=lambda *_: None, end=lambda _: None)
    request = Request((5,), np.zeros((1, 2), np.uint32), (SamplingParams(4),))
    with (
        mock.patch.object(harness_manager, "make_agent_pool", lambda config: pool),
        harness_manager.HarnessManager(config.agent, served, "*") as manager,
    ):
        agent = manager.start_agent(manager.open_wave(), PROMPTS[0], 0)
        accepted = 0
        with contextlib.suppress(RequestRejected):
            for _ in range(70):
                agent.session.submit((request,), print)
                accepted += 1
        log = manager.episode_log(agent, {"problem": "exception"})
        return accepted, log.reward, log.role_rewards


def generators(config):
    """The request for generated problems."""
    with (
        mock.patch.object(reasoning_gym_task, "check_package"),
        mock.patch.object(reasoning_gym_task.subprocess, "run") as run,
        contextlib.suppress(TypeError),  # nobody answers
    ):
        tasks.task_rows(config.data, "train", 0)
    return run.call_args.kwargs["input"]


def judged(config: RLConfig):
    """The requests to a judge that is busy for some of them, and the scores by its votes."""
    sent = []

    def urlopen(request, timeout):
        headers = tuple(sorted(request.headers.items()))
        sent.append((request.full_url, headers, timeout, request.data))
        if zlib.crc32(request.data) % 2 and sent.count(sent[-1]) < 5:
            raise OSError("busy")
        reply = {"choices": [{"message": {"content": '{"score": 5, "winner": "A"}'}}]}
        return contextlib.closing(io.StringIO(json.dumps(reply)))

    batch = rollouts(PROMPTS[:1], samples=5)
    batch = dataclasses.replace(batch, responses=tuple(map(str, range(len(batch.lengths)))))
    only = RewardsConfig(judges=config.rewards.judges, on_failure="score")
    with (
        mock.patch.dict("os.environ", {"none": "key"}),
        mock.patch.object(judge_client.urllib.request, "urlopen", urlopen),
        mock.patch.object(judge_client, "_FIRST_DELAY_S", 0.0),
        contextlib.ExitStack() as stack,
    ):
        try:
            scorer = stack.enter_context(rewards_lib.RolloutScorer(only, {}))
            sizes = [own._client._threads._max_workers for own in scorer._judges.values()]
            scores = scorer.score(batch).scores.tolist()
        except RewardError as error:
            return str(error), sorted(sent)
    return sizes, sorted(sent), scores


def _models(wanted):
    return {**wanted.models, **wanted.cost_models}


def evaluation(config: RLConfig):
    """Held-out prompts of an evaluation and how they are answered."""
    models = types.SimpleNamespace(eos_tokens=(2,), tokenizer=None)
    sampler = types.SimpleNamespace(engine=None, models=models, rollout=None, world=None)
    evaluator = evaluation_lib.Evaluator(
        config, sampler, datasets.Dataset(PROMPTS), None, jax.random.key(0)
    )
    prompts_and_params = lambda w, batch, samples, *_, **__: (len(batch.prompts), samples)  # noqa: E731
    return captured(lambda: evaluator(Weights({}, 0)), sampler, "rollout", prompts_and_params)


def frame(config):
    """Steps of a run, those that are evaluated or copied, and what ends it."""
    of_run = run.TrainingRun(config, "unused")
    evaluated = [step for step in range(of_run.total_steps + 1) if of_run.should_evaluate(step)]
    copied = [step for step in range(1, 7) if of_run.should_copy(step)]
    stop = of_run.interruption._grace_s, of_run.stop_check.condition
    return of_run.total_steps, evaluated, copied, stop


def schedule(config):
    """The updates that a learning rate decays over."""
    return config.num_updates, optimizer.learning_rate_schedule(
        config.trainer.optimizer, config.num_updates
    )(3)


def metrics(config):
    """Where numbers and rollouts go."""
    with mock.patch.dict(sys.modules, dict.fromkeys(("mlflow", "trackio", "wandb"))):
        trackers.check(config.metrics)  # packages of extras, which may be there
    name = trackers.run_name(config.metrics, pathlib.Path("here"))
    failures = []
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(writer_lib.Writer(folder, config.metrics, 0, 4, {})) as writer,
    ):
        names = [getattr(sink, "__qualname__", type(sink).__name__) for sink in writer._sinks]
        for number in (1, 2, 3):
            more = lambda: [{"tokens": [1]}]  # noqa: E731
            writer.write_rollouts(number, rollouts(), rewards([0.0, 1.0, 0.0, 1.0]), more)
        dumped = sorted(
            (path.name, '"tokens"' in path.read_text().partition("\n")[0])
            for path in pathlib.Path(folder).glob("rollouts/*")
        )
        with mock.patch.object(writer, "_sinks", [mock.Mock(side_effect=OSError("full"))]):
            try:
                writer.write(1, {})
            except OSError as error:
                failures.append(str(error))
        return (
            name,
            names,
            [number for number in range(6) if writer.is_due(number)],
            dumped,
            failures,
        )


def checkpoints(config):
    """Steps that are saved, those that stay, and what a full disk does."""
    numbers = {step: {"quality": 5.0 - abs(step - 2), "loss": step} for step in range(1, 7)}
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(pathlib.Path(folder) / "checkpoints", config.checkpoint)
        due = [step for step in numbers if saver.should_save(step, 6, numbers[step])]
        for number in (1, 2, 3):
            saver.save(number, {"w": jnp.zeros(2)}, {})
        saver.wait()
        kept = sorted(path.name for path in (pathlib.Path(folder) / "checkpoints").iterdir())
        failure = ""
        with mock.patch.object(ocp.CheckpointManager, "save", side_effect=OSError("full")):
            try:
                saver.save(4, {"w": jnp.zeros(2)}, {})
            except Exception as error:
                failure = type(error).__name__
        saver.close()
    return due, kept, failure


def alerts(config):
    """What fires in some steps with bad numbers, who is told, and what is skipped or stopped."""
    alerts_lib.check(config.alerts)
    stopped, posted, found = [], [], []
    bad = {
        "actor/ppo_kl": 0.6,
        "actor/kl_loss": 11.0,
        "actor/entropy": 1e-4,
        "training/rollout_probs_diff_mean": 0.2,
        "critic/score/spread": 0.5,
        "reward/failure_share": 0.2,
        "training/off_policy/staleness/mean": 5.0,
        "perf/idle_share/rollout": 0.6,
        "perf/idle_share/learner": 0.6,
        "timing_s/step": 1.0,
    }
    with (
        mock.patch.object(alerts_lib, "_post", lambda *a: posted.append(a[0])),
        tempfile.TemporaryDirectory() as folder,
        alerts_lib.Alerts(config.alerts, folder, stopped.append) as watch,
    ):
        for number in range(30):
            loss = float("nan") if number % 2 else 0.0
            numbers = {
                **bad,
                "actor/loss": loss,
                "perf/total_num_tokens": 9.0 if number > 20 else 99.0,
            }
            numbers |= {"actor/skipped_updates": 0.0}
            found.append((watch.allow_update(numbers), watch.check(number, numbers)))
    return found, [text[:60] for text in stopped], sorted(set(posted))


def balance(config):
    """Which layouts idle times ask for."""
    watch, found = idle_balancing.IdleTimeBalancer(config), []
    for _ in range(5):
        watch.observe({"perf/idle_share/learner": 0.6, "perf/idle_share/rollout": 0.0})
        found.append(list(watch.candidate_layouts(config)) if watch.is_due else [])
    return found


def pools_of_hosts(config):
    """The devices of two hosts that each role gets."""
    meshes = device_pools.role_meshes(config.placement, config.mesh, ROLES, tiny.hosts(2, 4))
    return {role: [device.id for device in mesh.devices.flat] for role, mesh in meshes.items()}


def profile(config):
    """Steps at which a recording begins and ends."""
    seen = []
    with (
        mock.patch.object(jax.profiler, "start_trace", lambda *a, **k: seen.append("begins")),
        mock.patch.object(jax.profiler, "stop_trace", lambda: seen.append("ends")),
        mock.patch.object(jax.profiler, "save_device_memory_profile", lambda *a: None),
        Profiler(config.profiler, pathlib.Path("unused")) as profiler,
    ):
        for number in range(6):
            seen.append(number)
            profiler.begin(number)
    return seen


def warned(config):
    """Settings that a job says it does not read."""
    return list(config.warnings())


def sampled_ahead(config: RLConfig):
    """What a run that samples ahead begins, keeps, and tells its schedule."""
    try:
        schedule = async_schedule.AsyncSchedule.from_config(config, pathlib.Path("here"))
    except UserError as error:
        return str(error)
    begun, how = [], []
    play = types.SimpleNamespace(
        is_running=True,
        start=lambda prompt, number, keys: begun.append(number),
        pause=lambda: how.append("paused") or [],
        resume=lambda **settings: how.append(settings),
    )
    engine = types.SimpleNamespace(reset=lambda max_prompt_tokens: None, clone=lambda: engine)
    models = types.SimpleNamespace(eos_tokens=(2,), tokenizer=None)
    sampler = types.SimpleNamespace(
        engine=engine, models=models, has_own_devices=True, world=None, grammar=None
    )
    stream = types.SimpleNamespace(
        next_batch=lambda n: PromptBatch(PROMPTS[:1] * n), max_prompt_tokens=4
    )
    with mock.patch.object(episodes_in_flight, "EpisodeRunner", lambda *a, **k: play):
        asked = async_source.AsyncSource(config, sampler, stream, None, schedule)
        asked._engine_weights = asked._newest_weights = Weights({}, 0)
        asked._start_allowed_prompts()
        asked._newest_weights = Weights({}, 1)
        asked._refresh_weights()
    return (
        begun,
        how,
        asked._current_weights.version,
        vars(schedule)["_mode"],
        str(vars(schedule)["_path"]),
    )


def source_of(config: RLConfig):
    """Which source a run has, by whether its samples may be stale."""
    return config.max_staleness, predict.is_on_policy(config), list(config.warnings())


def layouts(config: RLConfig):
    """Steps from which a run has other layouts."""
    return relayout_schedule.layouts_by_step(config)
