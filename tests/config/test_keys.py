"""No dead keys: each key of each job, set to another value, changes what the job is made of."""

import ast
import fnmatch
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import config_probes as probe
import jax
import numpy as np
import pytest
from config_fields import build, declared, other_value, value_at

from jaxrl_llm.algorithms.requirements import loss_hyperparameters
from jaxrl_llm.config.bridge import JOBS
from jaxrl_llm.config.recipes import POLICY_LOSSES
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.errors import UserError

SMALL = {
    "model.hidden_size": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.head_size": 8,
    "model.mlp_size": 16,
    "data.arithmetic_train_prompts": 12,
    "data.arithmetic_eval_prompts": 4,
    "data.max_prompt_tokens": 32,
    "trainer.num_steps": 4,
}
BASE = {job: SMALL | {"job": job} for job in JOBS}
BASE["rl"] |= {
    "algorithm.recipe": "ppo",
    "algorithm.samples_per_prompt": 2,
    "algorithm.kl_coef": 0.5,
    "rollout.max_response_tokens": 16,
    "rollout.num_slots": 8,
    "trainer.prompts_per_step": 4,
    "trainer.max_tokens_per_microbatch": 64,
    "rewards.functions": {"NAME": {"function": "arithmetic"}},
}
# What must be set besides for a key to matter. "FILE" and "PROMPTS" are files with rows, "FOLDER"
# is a folder with a tokenizer.
TRAIN_FILE = {"data.train_files": ("a.jsonl",)}
FILES = TRAIN_FILE | {"data.task": "files", "data.eval_files": ("b.jsonl",)}
READ = FILES | {"data.train_files": ("FILE",)}
READ_BOTH = READ | {"data.eval_files": ("FILE",)}
MIXTURE = FILES | {
    "data.train_files": ("PROMPTS", "FILE"),
    "data.eval_files": ("PROMPTS",),
    "data.train_weights": (3.0, 1.0),
}
ANSWERS = READ_BOTH | {"data.columns": {"answer": "completion"}}
UNNAMED = READ_BOTH | {"data.train_files": ("BARE",)}
MOVING = MIXTURE | {"data.last_train_weights": (0.0, 1.0), "data.last_train_weights_after": 4}
SHORT = {"data.max_prompt_tokens": 8}
FOLDER = {"model.tokenizer": "FOLDER"}
CURRICULUM = {"curriculum.choice": "success"}
SUPPORT = {"rollout.support_tokens": 8}
STRICT = SUPPORT | {"agent.tools": ("calculator",)}
IMAGES = {"model.family": "qwen2_5_vl"}
VLLM = {"rollout.engine": "vllm", "rollout.vllm.python": "python"}
VLLM_ADDRESS = {"rollout.engine": "vllm", "rollout.vllm.address": "localhost:1"}
EXPERTS = {"model.family": "mixtral"}
LAYERS = {"model.num_layers": 4, "mesh.fsdp": 1, "mesh.tensor": -1}
STAGES = LAYERS | {"mesh.stage": 2}
ADAPTERS = {"lora.rank": 2}
ROLES = dict.fromkeys(("policy", "critic", "reference", "reward"), "NAME") | {"rollout": "other"}
OTHER_ROLES = ROLES | {"critic": "other"}
POOLS = {
    "placement.choice": "by_hand",
    "placement.pools": {"NAME": {"devices": 4}, "other": {"devices": 4}},
    "placement.roles": ROLES,
}
ONE_POOL = POOLS | {"placement.pools": {"NAME": {"devices": 8}}}
ONE_POOL |= LAYERS | {"placement.roles": dict.fromkeys(ROLES, "NAME")}
FREE = {"mesh.data": -1, "mesh.fsdp": 1}
FREE_POOLS = POOLS | FREE
BEST = {"checkpoint.best_metric": "quality"}
SPREAD = {"alerts.constant_reward.limit": 1.0}
NOT_FINITE = {"alerts.nonfinite.action": "continue"}
DISK_OFF, DISK_FULL = {"alerts.disk.limit": 0.0}, {"alerts.disk.limit": 2.0}
PROFILED = {"profiler.first_step": 1}
WARM_START = {"warm_start.num_steps": 2}
JUDGE = {"rewards.functions": {}, "rewards.models": {"NAME": {}}, "preference.num_steps": 1}
ANSWER = {"rewards.functions": {"answer": {"function": "arithmetic"}}}
COST = {**ANSWER, "rewards.cost_models": {"NAME": {}}, "preference.num_steps": 1}
COSTS = {**ANSWER, "rewards.cost_functions": {"NAME": {"function": "length"}}}
JUDGED = {"rewards.functions": {}, "rewards.judges": {"NAME": {"address": "http://one"}}}
JUDGED_PAIRS = JUDGED | {
    "rewards.judges": {"NAME": {"address": "http://one", "mode": "pairwise", "votes": 1}}
}
GENERATED = {"data.task": "reasoning_gym", "data.reasoning_gym.generators": ("chain_sum",)}
JUDGE_PAIRS = JUDGE | {"rewards.models": {"NAME": {"pairs": ("FILE",)}}}
COST_PAIRS = COST | {"rewards.cost_models": {"NAME": {"pairs": ("FILE",)}}}
HELD_OUT = {"evaluation.functions": {"NAME": {"function": "arithmetic"}}}
SAMPLED = {"evaluation.temperature": 1.0}
MATH = {"rewards.functions": {"NAME": {"function": "math"}}}
TOOLS = {"agent.tools": ("calculator",)}
SEARCH = {"agent.tools": ("search",), "agent.corpus": "passages.jsonl"}
HARNESS = {"agent.harness": "agent.py:solve"}
SPEAKERS = HARNESS | {"algorithm.recipe": "grpo"}
WORLD = {"agent.environments": {"NAME": {"environment": "games:Game", "address": "here"}}}
TAUGHT = {"distillation.teachers": {"NAME": {"path": "nowhere"}}}
TAUGHT_JSD = TAUGHT | {"distillation.loss": "jsd"}
TAUGHT_KL = TAUGHT | {"distillation.loss": "forward_kl"}
LAYOUTS = ("5 mesh.tensor=2",)
ASYNC = {"trainer.sampling": "async"}
ASYNC_POOLS = POOLS | ASYNC
REPLAY = ASYNC | {"trainer.schedule": "replay", "trainer.schedule_file": "one.jsonl"}
GROUPS = {"algorithm.recipe": "grpo"}
DYNAMIC = GROUPS | {"algorithm.dynamic_sampling": True}
TERM = DYNAMIC | {"rewards.functions": {"b": {"function": "arithmetic"}}}
XPO = {"algorithm.advantage": "xpo"}
KL_LOSS = {"algorithm.kl_in": "loss"}
CPO = {"dpo.loss": "cpo"}
OVERLONG = {"algorithm.overlong_buffer_tokens": 12}
CORRECTED = GROUPS | {"algorithm.correction": "token"}
MASKED = CORRECTED | {"algorithm.correction_mode": "mask"}
REJECTED = GROUPS | {
    "algorithm.rejections": ("token_k1",),
    "algorithm.rejection_lows": (0.5,),
    "algorithm.rejection_highs": (2.0,),
}
ADAPTIVE = {"algorithm.kl_controller": "adaptive", "algorithm.kl_estimator": "k3"}
SAFE = COSTS | {"algorithm.safe": True}
SUMS = {"algorithm.aggregation": "seq-mean-token-sum-norm"}
ROUTED = {"router.replay": "rollout"}
RATE = {f"{path}.learning_rate": 0.1 for path in probe.OPTIMIZERS}
DECAY = RATE | {f"{path}.schedule": "linear" for path in probe.OPTIMIZERS}
MUON = RATE | {f"{path}.name": "muon" for path in probe.OPTIMIZERS}
WEIGHT_DECAY = RATE | {f"{path}.weight_decay": 0.5 for path in probe.OPTIMIZERS}


@functools.cache
def through_rl(part):
    """The probe of the run of RL that samples as a job does."""
    return lambda config: part(config.as_rl())


class Effect(NamedTuple):
    """Keys whose effect a probe shows, in a job that has some settings besides."""

    part: Callable[[Any], Any]
    settings: Mapping[str, Any]
    keys: str  # patterns, each with the other value where `other_value` makes none that matters

    def text(self, key: str) -> str | None:
        """The other value of a field as text, "" if any will do; None: it is not among the keys."""
        pairs = (each.partition("=") for each in self.keys.split())
        return next((text for name, _, text in pairs if fnmatch.fnmatchcase(key, name)), None)


def effects(table: str) -> tuple[Effect, ...]:
    """The rows `probe SETTINGS: keys` of a table."""
    rows = (row.split(": ", 1) for row in re.sub(r"\n +", " ", table).strip().split("\n"))
    return tuple(
        Effect(getattr(probe, part), globals()[settings] if settings else {}, keys)
        for (part, _, settings), keys in ((head.partition(" "), keys) for head, keys in rows)
    )


# How the effect of each key shows; of several rows the last holds.
EFFECTS = effects("""
prompts: seed data.max_prompt_tokens=8 data.shuffle data.chat_template data.num_workers
    data.arithmetic_terms data.arithmetic_train_prompts data.arithmetic_eval_prompts
prompts TRAIN_FILE: data.task=files
prompts FILES: data.train_files
prompts READ: data.eval_files
prompts READ_BOTH: data.prompt_column data.role_aliases=('user:system',) data.preset=alpaca
    data.columns={'prompt':'question'} data.prompt_template={question} data.system_prompt=Count.
    data.extra_columns=('question',) data.transcript_roles=('Human:user',)
prompts ANSWERS: data.answer_pattern='(3)'
prompts UNNAMED: data.data_source=named
prompts MIXTURE: data.stream data.train_weights=(1.0,5.0)
prompts MOVING: data.last_train_weights=(1.0,5.0) data.last_train_weights_after=1
prompts SHORT: data.long_rows
prompts FOLDER: model.chat_template
turns: data.rewritten_turns
examples_before_rl: data.arithmetic_errors
spelled_tokens: model.special_tokens_in_messages
curriculum: curriculum.choice=success
curriculum CURRICULUM: curriculum.success_score=1.5 curriculum.memory curriculum.floor
networks: model.path model.tokenizer model.words=('3+',) model.family=llama model.hidden_size=32
    model.num_layers model.num_heads=4 model.num_kv_heads model.head_size=16 model.mlp_size
    model.rope_theta model.tie_embeddings model.param_dtype model.compute_dtype model.remat=full
    model.attention=splash mesh.data=2 mesh.expert=2 mesh.sequence=2 mesh.tensor=2
    mesh.sequence_attention lora.rank critic.path reference.path trainer.max_tokens_per_microbatch
    trainer.shared_prompts placement.choice
networks EXPERTS: model.num_experts model.experts_per_token
networks FREE: mesh.fsdp=2
networks LAYERS: mesh.stage=2
networks STAGES: mesh.stage_rounds=2
networks ADAPTERS: lora.alpha lora.targets=('q',) lora.path model.quantization=int8
networks JUDGE: rewards.models.NAME.path
networks COST: rewards.cost_models.NAME.path
networks TAUGHT: distillation.teachers.NAME.path
networks POOLS: placement.pools.NAME.devices=2 placement.pools.NAME.data=2
    placement.pools.NAME.expert=2 placement.pools.NAME.sequence=2 placement.pools.NAME.tensor=2
networks POOLS: placement.roles=OTHER_ROLES
networks FREE_POOLS: placement.pools.NAME.fsdp=2
networks ONE_POOL: placement.pools.NAME.stage=2
pools_of_hosts POOLS: placement.hosts
balance ASYNC_POOLS: placement.balance_every=2
resting: mesh.on_host=('optimizer',)
towers IMAGES: model.vision.hidden_size=32 model.vision.num_layers=1 model.vision.num_heads=2
    model.vision.mlp_size model.vision.patch_size=2 model.vision.window_size=8
    trainer.tower_learning_rate
frame: trainer.num_steps trainer.stop_when=val/sft/loss<0.5 checkpoint.grace_s evaluation.every=2
    checkpoint.memory_every=2
    evaluation.before evaluation.after
checkpoints: checkpoint.every=2 checkpoint.keep=1 checkpoint.best_metric=quality
    checkpoint.on_failure
checkpoints BEST: checkpoint.best_mode
metrics: metrics.every=2 metrics.console metrics.tensorboard metrics.wandb_project
    metrics.mlflow_experiment metrics.trackio_project metrics.run_name metrics.rollouts_every=2
    metrics.rollout_tokens metrics.on_failure
alerts: alerts.*.limit=1.0 alerts.*.steps=3 alerts.*.action=stop alerts.webhook alerts.function
alerts: alerts.reference_kl.limit=20.0 alerts.entropy.limit=1e-6
    alerts.log_prob_difference.limit=0.5 alerts.reward_failures.limit=0.5 alerts.staleness.limit=6.0
    alerts.rollout_idle.limit=0.7 alerts.learner_idle.limit=0.7 alerts.nonfinite.action=off
    alerts.disk.action=off alerts.throughput.limit=0.0 alerts.throughput.steps=1
    alerts.throughput.action=off
alerts SPREAD: alerts.constant_reward.steps=2 alerts.constant_reward.action=stop
alerts NOT_FINITE: alerts.nonfinite.steps=3
alerts DISK_OFF: alerts.disk.limit=2.0
alerts DISK_FULL: alerts.disk.steps=3
profile: profiler.first_step=2
profile PROFILED: profiler.num_steps
stages: warm_start.num_steps preference.num_steps preference.batch_size preference.save_every=3
stages WARM_START: warm_start.batch_size warm_start.save_every=3
pairs JUDGE: rewards.models.NAME.pairs=('FILE',)
pairs JUDGE_PAIRS: rewards.models.NAME.pairs_preset=hh_rlhf
pairs COST: rewards.cost_models.NAME.pairs=('FILE',)
pairs COST_PAIRS: rewards.cost_models.NAME.pairs_preset=hh_rlhf
engine: mesh.rollout rollout.max_response_tokens rollout.engine=nowhere:Engine rollout.temperature
    rollout.top_k rollout.top_p rollout.min_p rollout.support_tokens=8
    rollout.stop_tokens rollout.stop_strings
    rollout.num_slots rollout.cache_tokens=4096 rollout.chunk_steps rollout.dtype=bfloat16
    rollout.prefix_caching rollout.window_cache=sequence
    rollout.quantization rollout.cache_dtype=fp8 rollout.speculation.draft_tokens=2
    rollout.speculation.ngram_tokens agent.max_turn_tokens=3
engine IMAGES: rollout.suppress_unused_tokens
engine STRICT: agent.strict_tools
engine SUPPORT: rollout.schema='{"type":"integer"}'
vllm_worker VLLM: rollout.vllm.python rollout.vllm.tensor_parallel_size
    rollout.vllm.gpu_memory_utilization rollout.vllm.llm_args={'NAME':'1'} rollout.vllm.sleep_level
    rollout.vllm.continuous rollout.vllm.timeout_s
vllm_worker VLLM_ADDRESS: rollout.vllm.address=other:2
step: trainer.prompts_per_step algorithm.samples_per_prompt algorithm.overlong_buffer_tokens=12
step OVERLONG: algorithm.overlong_penalty=3.0
step GROUPS: algorithm.dynamic_sampling
step DYNAMIC: algorithm.max_sampling_waves=2
step TERM: algorithm.dynamic_sampling_term=b
source_of: trainer.sampling
sampled_ahead ASYNC: trainer.max_staleness trainer.new_weights=keep trainer.schedule=record
sampled_ahead REPLAY: trainer.schedule_file
layouts: trainer.layouts=LAYOUTS
evaluation: evaluation.num_prompts=3 evaluation.temperature evaluation.top_p
evaluation SAMPLED: evaluation.samples_per_prompt
scores HELD_OUT: evaluation.functions.NAME.*
scores HELD_OUT: evaluation.functions.NAME.function=gsm8k
scores: rewards.functions.NAME.function=gsm8k rewards.functions.NAME.weight
    rewards.functions.NAME.data_source rewards.num_workers rewards.ray_workers rewards.timeout_s
    rewards.memory_gib rewards.environment rewards.on_failure rewards.failure_score
scores JUDGE: rewards.models.NAME.weight rewards.models.NAME.data_source
scores COSTS: rewards.cost_functions.NAME.function=gsm8k rewards.cost_functions.NAME.weight
    rewards.cost_functions.NAME.data_source
scores COST: rewards.cost_models.NAME.weight rewards.cost_models.NAME.data_source
scores WORLD: rewards.environment_weight
scores MATH: rewards.math.*
readable_truths: rewards.unreadable_truths
agents TOOLS: agent.tools=('python',) agent.call_format=hermes agent.max_turns=2 agent.max_calls=2
    agent.max_result_characters=100 agent.cut_results agent.timeout_s agent.max_tool_s
    agent.num_processes=2 agent.episodes_per_process=2 agent.ray_workers agent.memory_gib
    agent.visible=('HOME',)
agents WORLD: agent.environments.NAME.environment=other:Class agent.environments.NAME.address
    agent.default=tool_agent
agents SEARCH: agent.corpus
generators GENERATED: data.reasoning_gym.generators=('leg_counting',) data.reasoning_gym.levels
    data.reasoning_gym.system_prompt=none
judged JUDGED: rewards.judges.NAME.*
judged JUDGED_PAIRS: rewards.judges.NAME.num_opponents=2
agents HARNESS: agent.harness=other.py:solve agent.harness_timeout_s
    agent.max_harness_processes=2
sessions HARNESS: agent.max_requests=1 agent.failure_reward
sessions SPEAKERS: agent.roles=('a','b')
estimates: algorithm.advantage=rloo algorithm.gamma algorithm.gae_lambda algorithm.kl_in=none
    algorithm.kl_estimator=k3 algorithm.kl_coef=0.1 algorithm.kl_controller algorithm.mask_truncated
estimates GROUPS: algorithm.group_std algorithm.mask_uniform_groups algorithm.entropy_share
estimates XPO: algorithm.dpo_beta=0.7 algorithm.exploration_coef=0.5
opponents: algorithm.mixture_coef=0.1
estimates ADAPTIVE: algorithm.kl_target=900.0 algorithm.kl_horizon=7
estimates CORRECTED: algorithm.correction=sequence algorithm.correction_mode
    algorithm.correction_high=1.1 algorithm.correction_normalize
estimates MASKED: algorithm.correction_low=0.9
estimates REJECTED: algorithm.rejections=('seq_mean_k1',) algorithm.rejection_lows=(0.1,)
    algorithm.rejection_highs=(1.1,)
estimates COSTS: algorithm.safe
estimates SAFE: algorithm.cost_limit algorithm.multiplier_init algorithm.multiplier_lr
    algorithm.multiplier_max=1.01
policy_loss: algorithm.recipe=dr_grpo algorithm.policy_loss=cispo algorithm.aggregation=token-sum
    algorithm.clip_low=0.1 algorithm.clip_high=0.1 algorithm.entropy_coef
    algorithm.loss_args={'dual_clip':1.1} algorithm.off_policy_threshold=0.1
policy_loss KL_LOSS: algorithm.kl_unbiased
value_loss: algorithm.value_clip=0.1
lessons TAUGHT: distillation.teachers.NAME.data_source
lessons TAUGHT_KL: distillation.top_k=3
top_k_losses TAUGHT_JSD: distillation.jsd_beta=0.9
distilled TAUGHT: distillation.loss=k3 distillation.coef=3.0
updates: trainer.minibatch_size=4 trainer.epochs algorithm.critic_warmup_steps=1
optimizers RATE: *optimizer.*
optimizers RATE: *optimizer.warmup_steps=2 *optimizer.max_grad_norm=0.1
optimizers DECAY: *optimizer.min_lr_ratio
optimizers RATE: *optimizer.rates=('bias=0.5',)
optimizers MUON: *optimizer.muon_beta
optimizers WEIGHT_DECAY: *optimizer.weight_decay_on
update_program: trainer.optimizer.learning_rate critic.optimizer.learning_rate
update_program SUMS: algorithm.loss_scale=50.0
update_program GROUPS: algorithm.old_log_probs=rollout algorithm.observation_coef
asked: model.vocab_chunk
routers: router.balance_coef router.z_coef router.bias_rate router.replay=rollout
routers ROUTED: router.missing_routes=own
""")
# The rows that differ in supervised jobs.
SUPERVISED = effects("""
examples: seed data.max_prompt_tokens=8 data.chat_template data.arithmetic_terms
    data.arithmetic_train_prompts data.arithmetic_eval_prompts data.arithmetic_errors
examples TRAIN_FILE: data.task=files
examples READ: data.train_files
examples READ_BOTH: data.prompt_column data.role_aliases=('user:system',) data.preset=alpaca
    data.columns={'prompt':'question'} data.prompt_template={question} data.system_prompt=Count.
    data.transcript_roles=('Human:user',)
examples SHORT: data.long_rows
examples FOLDER: model.chat_template
held_out READ: data.eval_files
supervised_batch: data.shuffle data.num_workers trainer.batch_size=3
    trainer.max_tokens_per_microbatch=256 trainer.max_sequence_tokens=8
supervised_batch MIXTURE: data.stream data.train_weights=(1.0,5.0)
supervised_batch MOVING: data.last_train_weights=(1.0,5.0) data.last_train_weights_after=1
supervised_loss: model.vocab_chunk
supervised_evaluation: evaluation.num_prompts=3
optimizers RATE: trainer.optimizer.learning_rate
router_losses: router.balance_coef router.z_coef router.bias_rate
dpo_loss: dpo.loss=hinge dpo.beta dpo.label_smoothing=0.2
dpo_loss CPO: dpo.loss_args={'nll_coef':0.5}
sft_loss: loss=dft
""")
# What a job samples for evaluation, and scores, is what its run of RL would.
SCORED = "data.answer_pattern data.extra_columns data.data_source"
SAMPLING = tuple(
    each._replace(part=through_rl(each.part))
    for each in EFFECTS
    if each.part in (probe.engine, probe.vllm_worker, probe.evaluation, probe.scores)
    or any(each.text(key) is not None for key in SCORED.split())
)
FIELDS = [(job, field) for job in JOBS for field in declared(JOBS[job]) if field.key != "job"]


@functools.cache
def effect(job: str, key: str) -> Effect:
    """How the effect of a field shows in a job."""
    effects = EFFECTS if job == "rl" else (*EFFECTS, *SAMPLING, *SUPERVISED)
    return next(each for each in reversed(effects) if each.text(key) is not None)


def is_unread(job: str, key: str) -> bool:
    unread = build(BASE[job]).unread if job != "rl" else ()
    return any(key == group or key.startswith(f"{group}.") for group in unread)


def is_repetition(job: str, key: str) -> bool:
    """Whether RL or SFT is asked the same in the default suite."""
    return job != "rl" and (job != "sft" or effect(job, key) not in SUPERVISED)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What "FILE" and "FOLDER" stand for."""
    folder = tmp_path_factory.mktemp("places")
    character_tokenizer().save_pretrained(folder)
    answers = {"completion": "2", "chosen": "2", "rejected": "3"}
    row = {"data_source": "mine", "prompt": "1+1=", "question": "2+2=", **answers}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "bare.jsonl").write_text(json.dumps({"prompt": "1+1=", **answers}) + "\n")
    rows = [{"data_source": "all", "prompt": f"{i}+1=", **answers} for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "BARE": str(folder / "bare.jsonl"),
        "FILE": str(folder / "rows.jsonl"),
        "PROMPTS": str(folder / "prompts.jsonl"),
        "FOLDER": str(folder),
    }


def outcome(part, config):
    """What a probe finds, or the error that a user sees, to be compared."""
    try:
        found = part(config)
    except UserError as error:
        return str(error)
    plain = jax.tree.map(lambda a: np.asarray(a).tolist() if hasattr(a, "ndim") else a, found)
    return repr(plain)


OUTCOMES: dict[tuple[Any, str], str] = {}


@pytest.mark.parametrize(
    ("job", "field"),
    [
        pytest.param(job, field, marks=pytest.mark.nightly if is_repetition(job, field.key) else ())
        for job, field in FIELDS
    ],
    ids=str,
)
def test_every_key_changes_something(job, field, places):
    unread = is_unread(job, field.key)
    asked = effect("rl" if unread else job, field.key)
    part = probe.warned if unread else asked.part
    groups = vars(JOBS[job]())
    settings = {k: v for k, v in asked.settings.items() if k.split(".")[0] in groups}
    before = BASE[job] | ({} if unread else settings)
    config = build(before, places)
    if text := asked.text(field.key):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = globals().get(text, text)
    else:
        value = other_value(field, value_at(build(before | settings, places), field.key))
    known = part, repr(config)
    if known not in OUTCOMES:
        OUTCOMES[known] = outcome(part, config)
    assert OUTCOMES[known] != outcome(part, build(before | settings | {field.key: value}, places))


# Of each loss: another value of a hyperparameter, and those that it needs to matter.
LOSS_ARGS = {
    ("vanilla", "dual_clip"): (1.1, {}),
    ("sapo", "tau_pos"): (2.0, {}),
    ("sapo", "tau_neg"): (2.0, {}),
    ("clip_cov", "share"): (1.0, {"low": -99.0}),
    ("clip_cov", "low"): (-99.0, {"share": 1.0}),
    ("clip_cov", "high"): (-1.0, {"share": 1.0, "low": -99.0}),
    ("kl_cov", "coef"): (3.0, {}),
    ("kl_cov", "share"): (0.5, {}),
    ("dppo_tv", "dual_clip"): (1.1, {}),
    ("dppo_kl", "dual_clip"): (1.1, {}),
    ("dro", "beta"): (2.0, {}),
    **{("vespo", name): (0.5, {}) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    ("m2po", "budget"): (0.0, {}),
}


@pytest.mark.parametrize("policy_loss, name", LOSS_ARGS)
def test_every_hyperparameter_changes_its_loss(policy_loss, name):
    value, others = LOSS_ARGS[policy_loss, name]
    base = {**BASE["rl"], "algorithm.policy_loss": policy_loss, "algorithm.kl_in": "none"}
    before = outcome(probe.policy_loss, build(base | {"algorithm.loss_args": others}))
    after = build(base | {"algorithm.loss_args": others | {name: value}})
    assert before != outcome(probe.policy_loss, after)


def test_no_hyperparameter_is_left_out():
    assert set(LOSS_ARGS) == {
        (loss, name) for loss in POLICY_LOSSES for name in loss_hyperparameters(loss)
    }


def test_the_tables_hold_no_other_keys():
    keys = {field.key for _, field in FIELDS}
    for each in (*EFFECTS, *SUPERVISED):
        for name in each.keys.split():
            assert fnmatch.filter(keys, name.partition("=")[0]), name


def test_a_job_is_of_its_class():
    assert {job: type(build(BASE[job])) for job in JOBS} == JOBS


@pytest.mark.parametrize("job", JOBS)
def test_a_dead_key_is_found(job):
    """A probe says nothing of keys that it does not read."""
    before, after = BASE[job], BASE[job] | {"checkpoint.keep": 9}
    assert outcome(probe.networks, build(before)) == outcome(probe.networks, build(after))
