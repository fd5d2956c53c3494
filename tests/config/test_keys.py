"""No dead keys: each key of each job, set to another value, changes what the job is made of."""

import copy
import functools
import json

import config_probes as probe
import jax
import numpy as np
import pytest
from config_fields import listed

from jaxrl_llm.algorithms.requirements import loss_hyperparameters
from jaxrl_llm.config.bridge import JOBS, from_config_dict
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
}
BASE = {
    "rl": {
        **SMALL,
        "algorithm.recipe": "ppo",
        "algorithm.samples_per_prompt": 2,
        "algorithm.kl_coef": 0.5,
        "rollout.max_response_tokens": 16,
        "rollout.num_slots": 8,
        "trainer.prompts_per_step": 4,
        "trainer.max_tokens_per_microbatch": 64,
        "trainer.num_steps": 4,
        "rewards.functions": {"NAME": {"function": "arithmetic"}},
    },
    "sft": {**SMALL, "job": "sft", "trainer.num_steps": 4},
    "dpo": {**SMALL, "job": "dpo", "trainer.num_steps": 4},
    "reward_model": {**SMALL, "job": "reward_model", "trainer.num_steps": 4},
}
JUDGE = {"rewards.functions": {}, "rewards.models": {"NAME": {}}, "preference.num_steps": 1}
ANSWER = {"rewards.functions": {"answer": {"function": "arithmetic"}}}
COST = {**ANSWER, "rewards.cost_models": {"NAME": {}}, "preference.num_steps": 1}
COSTS = {**ANSWER, "rewards.cost_functions": {"NAME": {"function": "length"}}}
TOOLS = {"agent.tools": ("calculator",)}
MATH = {"rewards.functions": {"NAME": {"function": "math"}}}
WORLD = {"agent.environments": {"NAME": {"environment": "games:Game", "address": "here"}}}
TAUGHT = {"distillation.teachers": {"NAME": {"path": "nowhere"}}}
AHEAD = {"trainer.sampling": "async"}
SAFE = {"algorithm.safe": True, **COSTS}
GROUPS = {"algorithm.recipe": "grpo"}
CORRECTED = {**GROUPS, "algorithm.correction": "token"}
MASKED = {**CORRECTED, "algorithm.correction_mode": "mask"}
REJECTED = {
    **GROUPS,
    "algorithm.rejections": ("token_k1",),
    "algorithm.rejection_lows": (0.5,),
    "algorithm.rejection_highs": (2.0,),
}
ADAPTIVE = {"algorithm.kl_controller": "adaptive", "algorithm.kl_estimator": "k3"}
DYNAMIC = {**GROUPS, "algorithm.dynamic_sampling": True}
ROLES = dict.fromkeys(("policy", "critic", "reference", "reward"), "NAME") | {"rollout": "other"}
POOLS = {
    "placement.choice": "by_hand",
    "placement.pools": {"NAME": {"devices": 4}, "other": {"devices": 4}},
    "placement.roles": ROLES,
}
FREE = {**POOLS, "mesh.data": -1, "mesh.fsdp": 1}
ALONE = dict.fromkeys(ROLES, "NAME")
LAYERS = {"model.num_layers": 4, "mesh.fsdp": 1, "mesh.tensor": -1}
LONG = {"algorithm.overlong_buffer_tokens": 12}
HELD_OUT = {"evaluation.functions": {"NAME": {"function": "arithmetic"}}}
WARM = {"warm_start.num_steps": 2}
FILES = {"data.task": "files", "data.train_files": ("a.jsonl",), "data.eval_files": ("b.jsonl",)}
READ = FILES | {"data.train_files": ("FILE",)}
BOTH = READ | {"data.eval_files": ("FILE",)}
MIXTURE = {
    "data.task": "files",
    "data.train_files": ("PROMPTS", "FILE"),
    "data.eval_files": ("PROMPTS",),
    "data.train_weights": (3.0, 1.0),
}
MOVING = MIXTURE | {"data.last_train_weights": (0.0, 1.0), "data.last_train_weights_after": 4}
CHOSEN = {"curriculum.choice": "success"}
SPREAD = {"alerts.constant_reward.limit": 1.0}
BEST = {"checkpoint.best_metric": "quality"}


# Probe, another value, and what else must be set for the key to matter. "FILE" and "FOLDER" are
# a file with rows and a folder with a tokenizer.
DATA = {
    "config.seed": (probe.prompts, 1),
    "config.data.task": (probe.prompts, "files", {"data.train_files": ("a.jsonl",)}),
    "config.data.train_files": (probe.prompts, ("none.jsonl",), FILES),
    "config.data.stream": (probe.prompts, True, MIXTURE),
    "config.data.train_weights": (probe.prompts, (1.0, 5.0), MIXTURE),
    "config.data.last_train_weights": (probe.prompts, (1.0, 5.0), MOVING),
    "config.data.last_train_weights_after": (probe.prompts, 1, MOVING),
    "config.data.eval_files": (
        probe.prompts,
        ("none.jsonl",),
        FILES | {"data.train_files": ("FILE",)},
    ),
    "config.data.prompt_column": (
        probe.prompts,
        "question",
        READ | {"data.eval_files": ("FILE",)},
    ),
    "config.data.preset": (probe.prompts, "alpaca", BOTH),
    "config.data.columns": (probe.prompts, {"prompt": "question"}, BOTH),
    "config.data.prompt_template": (probe.prompts, "{question}", BOTH),
    "config.data.system_prompt": (probe.prompts, "Count.", BOTH),
    "config.data.answer_pattern": (
        probe.prompts,
        "(3)",
        BOTH | {"data.columns": {"answer": "completion"}},
    ),
    "config.data.extra_columns": (probe.prompts, ("question",), BOTH),
    "config.data.transcript_roles": (probe.prompts, ("Human:user",), BOTH),
    "config.data.data_source": (
        probe.prompts,
        "named",
        BOTH | {"data.train_files": ("BARE",)},
    ),
    "config.data.role_aliases": (
        probe.prompts,
        ("user:system",),
        READ | {"data.eval_files": ("FILE",)},
    ),
    "config.data.max_prompt_tokens": (probe.prompts, 8),
    "config.data.long_rows": (probe.prompts, "left", {"data.max_prompt_tokens": 8}),
    "config.data.rewritten_turns": (probe.turns, "whole"),
    "config.data.shuffle": (probe.prompts, False),
    "config.data.chat_template": (probe.prompts, False),
    "config.data.num_workers": (probe.prompts, 2),
    "config.data.arithmetic_terms": (probe.prompts, 4),
    "config.data.arithmetic_train_prompts": (probe.prompts, 13),
    "config.data.arithmetic_eval_prompts": (probe.prompts, 5),
    "config.data.arithmetic_errors": (probe.examples_before_rl, 0.9),
    "config.model.chat_template": (probe.prompts, "none.jinja", {"model.tokenizer": "FOLDER"}),
}
IMAGES = {"model.family": "qwen2_5_vl"}
SHARED = {
    "config.model.path": (probe.networks, "none"),
    "config.model.tokenizer": (probe.networks, "none"),
    "config.model.words": (probe.networks, ("3+",)),
    "config.model.special_tokens_in_messages": (probe.spelled_tokens, "tokens"),
    "config.model.family": (probe.networks, "llama"),
    "config.model.hidden_size": (probe.networks, 32),
    "config.model.num_layers": (probe.networks, 2),
    "config.model.num_heads": (probe.networks, 4),
    "config.model.num_kv_heads": (probe.networks, 2),
    "config.model.head_size": (probe.networks, 16),
    "config.model.mlp_size": (probe.networks, 32),
    "config.model.num_experts": (probe.networks, 5, {"model.family": "mixtral"}),
    "config.model.experts_per_token": (probe.networks, 1, {"model.family": "mixtral"}),
    "config.model.vision.hidden_size": (probe.towers, 32, IMAGES),
    "config.model.vision.num_layers": (probe.towers, 1, IMAGES),
    "config.model.vision.num_heads": (probe.towers, 2, IMAGES),
    "config.model.vision.mlp_size": (probe.towers, 32, IMAGES),
    "config.model.vision.patch_size": (probe.towers, 2, IMAGES),
    "config.model.vision.window_size": (probe.towers, 8, IMAGES),
    "config.trainer.tower_learning_rate": (probe.towers, 0.5, IMAGES),
    "config.model.rope_theta": (probe.networks, 500.0),
    "config.model.tie_embeddings": (probe.networks, False),
    "config.model.param_dtype": (probe.networks, "bfloat16"),
    "config.model.compute_dtype": (probe.networks, "bfloat16"),
    "config.model.remat": (probe.networks, "full"),
    "config.model.attention": (probe.networks, "splash"),
    "config.mesh.stage": (probe.networks, 2, LAYERS),
    "config.mesh.stage_rounds": (probe.networks, 2, {**LAYERS, "mesh.stage": 2}),
    "config.mesh.data": (probe.networks, 2),
    "config.mesh.fsdp": (probe.networks, 2, {"mesh.data": -1, "mesh.fsdp": 1}),
    "config.mesh.expert": (probe.networks, 2),
    "config.mesh.sequence": (probe.networks, 2),
    "config.mesh.tensor": (probe.networks, 2),
    "config.mesh.sequence_attention": (probe.networks, "ring"),
    "config.trainer.num_steps": (probe.frame, 5),
    "config.checkpoint.every": (probe.checkpoints, 2),
    "config.checkpoint.keep": (probe.checkpoints, 1),
    "config.checkpoint.best_metric": (probe.checkpoints, "quality"),
    "config.checkpoint.best_mode": (
        probe.checkpoints,
        "min",
        {"checkpoint.best_metric": "quality"},
    ),
    "config.checkpoint.on_failure": (probe.checkpoints, "continue"),
    "config.checkpoint.grace_s": (probe.frame, 1.0),
    "config.metrics.every": (probe.metrics, 2),
    "config.metrics.console": (probe.metrics, False),
    "config.metrics.tensorboard": (probe.metrics, False),
    "config.metrics.wandb_project": (probe.metrics, "mine"),
    "config.metrics.mlflow_experiment": (probe.metrics, "mine"),
    "config.metrics.trackio_project": (probe.metrics, "mine"),
    "config.metrics.run_name": (probe.metrics, "mine"),
    "config.metrics.rollouts_every": (probe.metrics, 2),
    "config.metrics.rollout_tokens": (probe.metrics, True),
    "config.metrics.on_failure": (probe.metrics, "continue"),
    "config.alerts.nonfinite.limit": (probe.alerts, 1.0),
    "config.alerts.kl.limit": (probe.alerts, 1.0),
    "config.alerts.reference_kl.limit": (probe.alerts, 20.0),
    "config.alerts.entropy.limit": (probe.alerts, 1e-6),
    "config.alerts.log_prob_difference.limit": (probe.alerts, 0.5),
    "config.alerts.constant_reward.limit": (probe.alerts, 1.0),
    "config.alerts.reward_failures.limit": (probe.alerts, 0.5),
    "config.alerts.staleness.limit": (probe.alerts, 6.0),
    "config.alerts.rollout_idle.limit": (probe.alerts, 0.7),
    "config.alerts.learner_idle.limit": (probe.alerts, 0.7),
    "config.alerts.disk.limit": (probe.alerts, 2.0, {"alerts.disk.limit": 0.0}),
    "config.alerts.throughput.limit": (probe.alerts, 0.0),
    "config.alerts.webhook": (probe.alerts, "http://localhost:1/"),
    "config.alerts.function": (probe.alerts, "none.py:f"),
    "config.profiler.first_step": (probe.profile, 2),
    "config.profiler.num_steps": (probe.profile, 3, {"profiler.first_step": 1}),
}
WATCHED = "kl", "reference_kl", "entropy", "log_prob_difference", "reward_failures", "staleness"
for name in (*WATCHED, "rollout_idle", "learner_idle"):
    SHARED[f"config.alerts.{name}.steps"] = (probe.alerts, 3)
    SHARED[f"config.alerts.{name}.action"] = (probe.alerts, "stop")
SHARED |= {
    "config.alerts.nonfinite.steps": (probe.alerts, 3, {"alerts.nonfinite.action": "continue"}),
    "config.alerts.nonfinite.action": (probe.alerts, "off"),
    "config.alerts.constant_reward.steps": (probe.alerts, 2, SPREAD),
    "config.alerts.constant_reward.action": (probe.alerts, "stop", SPREAD),
    "config.alerts.disk.steps": (probe.alerts, 3, {"alerts.disk.limit": 2.0}),
    "config.alerts.disk.action": (probe.alerts, "off"),
    "config.alerts.throughput.steps": (probe.alerts, 1),
    "config.alerts.throughput.action": (probe.alerts, "off"),
}
OPTIMIZER = {
    "learning_rate": (0.5,),
    "schedule": ("linear",),
    "warmup_steps": (2,),
    "min_lr_ratio": (0.5, {"schedule": "linear"}),
    "weight_decay": (0.5,),
    "weight_decay_on": ("matrices", {"weight_decay": 0.5}),
    "beta1": (0.5,),
    "beta2": (0.5,),
    "eps": (0.5,),
    "max_grad_norm": (0.1,),
    "moment_dtype": ("bfloat16",),
}


def of_optimizer(path):
    return {
        f"config.{path}.{name}": (
            probe.optimizers,
            value,
            {f"{path}.learning_rate": 0.1}
            | {f"{path}.{k}": v for k, v in (more or [{}])[0].items()},
        )
        for name, (value, *more) in OPTIMIZER.items()
    }


RL = {
    **DATA,
    **SHARED,
    **of_optimizer("trainer.optimizer"),
    **of_optimizer("critic.optimizer"),
    **of_optimizer("warm_start.optimizer"),
    **of_optimizer("preference.optimizer"),
    "config.trainer.optimizer.learning_rate": (probe.update_program, 0.5),
    "config.critic.optimizer.learning_rate": (probe.update_program, 0.5),
    "config.model.vocab_chunk": (probe.asked, 8),
    "config.lora.rank": (probe.networks, 2),
    "config.lora.alpha": (probe.networks, 8.0, {"lora.rank": 2}),
    "config.lora.targets": (probe.networks, ("q",), {"lora.rank": 2}),
    "config.router.balance_coef": (probe.routers, 0.5),
    "config.router.z_coef": (probe.routers, 0.5),
    "config.router.bias_rate": (probe.routers, 0.5),
    "config.router.replay": (probe.routers, "rollout"),
    "config.router.missing_routes": (probe.routers, "own", {"router.replay": "rollout"}),
    "config.lora.path": (probe.networks, "none", {"lora.rank": 2}),
    "config.mesh.rollout": (probe.engine, "replicas"),
    "config.mesh.on_host": (probe.resting, ("optimizer",)),
    "config.critic.path": (probe.networks, "none"),
    "config.reference.path": (probe.networks, "none"),
    "config.trainer.max_tokens_per_microbatch": (probe.networks, 128),
    "config.trainer.shared_prompts": (probe.networks, "off"),
    "config.trainer.prompts_per_step": (probe.step, 5),
    "config.trainer.minibatch_size": (probe.updates, 4),
    "config.trainer.epochs": (probe.updates, 2),
    "config.trainer.sampling": (probe.source_of, "async"),
    "config.trainer.max_staleness": (probe.sampled_ahead, 2, AHEAD),
    "config.trainer.new_weights": (probe.sampled_ahead, "keep", AHEAD),
    "config.trainer.schedule": (probe.sampled_ahead, "record", AHEAD),
    "config.trainer.layouts": (probe.layouts, ("5 mesh.tensor=2",)),
    "config.trainer.schedule_file": (
        probe.sampled_ahead,
        "other.jsonl",
        AHEAD | {"trainer.schedule": "replay", "trainer.schedule_file": "one.jsonl"},
    ),
    "config.evaluation.functions.NAME.function": (probe.scores, "gsm8k", HELD_OUT),
    "config.evaluation.functions.NAME.weight": (probe.scores, 3.0, HELD_OUT),
    "config.evaluation.functions.NAME.data_source": (probe.scores, "elsewhere", HELD_OUT),
    "config.evaluation.every": (probe.frame, 2),
    "config.evaluation.before": (probe.frame, False),
    "config.evaluation.after": (probe.frame, False),
    "config.evaluation.num_prompts": (probe.evaluation, 3),
    "config.evaluation.samples_per_prompt": (probe.evaluation, 2, {"evaluation.temperature": 1.0}),
    "config.evaluation.temperature": (probe.evaluation, 0.5),
    "config.evaluation.top_p": (probe.evaluation, 0.5),
    "config.algorithm.recipe": (probe.policy_loss, "dr_grpo"),
    "config.algorithm.samples_per_prompt": (probe.step, 3),
    "config.algorithm.advantage": (probe.estimates, "rloo"),
    "config.algorithm.gamma": (probe.estimates, 0.5),
    "config.algorithm.gae_lambda": (probe.estimates, 0.5),
    "config.algorithm.group_std": (probe.estimates, False, GROUPS),
    "config.algorithm.policy_loss": (probe.policy_loss, "cispo"),
    "config.algorithm.aggregation": (probe.policy_loss, "token-sum"),
    "config.algorithm.loss_scale": (
        probe.update_program,
        50.0,
        {"algorithm.aggregation": "seq-mean-token-sum-norm"},
    ),
    "config.algorithm.clip_low": (probe.policy_loss, 0.1),
    "config.algorithm.clip_high": (probe.policy_loss, 0.1),
    "config.algorithm.loss_args": (probe.policy_loss, {"dual_clip": 1.1}),
    "config.algorithm.entropy_coef": (probe.policy_loss, 0.5),
    "config.algorithm.kl_in": (probe.estimates, "none"),
    "config.algorithm.kl_estimator": (probe.estimates, "k3"),
    "config.algorithm.kl_coef": (probe.estimates, 0.1),
    "config.algorithm.kl_controller": (probe.estimates, "adaptive"),
    "config.algorithm.kl_target": (probe.estimates, 900.0, ADAPTIVE),
    "config.algorithm.kl_horizon": (probe.estimates, 7, ADAPTIVE),
    "config.algorithm.value_clip": (probe.value_loss, 0.1),
    "config.algorithm.critic_warmup_steps": (probe.updates, 1),
    "config.algorithm.dynamic_sampling": (probe.step, True, GROUPS),
    "config.algorithm.max_sampling_waves": (probe.step, 2, DYNAMIC),
    "config.algorithm.overlong_buffer_tokens": (probe.step, 12),
    "config.algorithm.overlong_penalty": (probe.step, 3.0, LONG),
    "config.algorithm.mask_truncated": (probe.estimates, True),
    "config.algorithm.correction": (probe.estimates, "sequence", CORRECTED),
    "config.algorithm.correction_mode": (probe.estimates, "mask", CORRECTED),
    "config.algorithm.correction_low": (probe.estimates, 0.9, MASKED),
    "config.algorithm.correction_high": (probe.estimates, 1.1, CORRECTED),
    "config.algorithm.correction_normalize": (probe.estimates, True, CORRECTED),
    "config.algorithm.rejections": (probe.estimates, ("seq_mean_k1",), REJECTED),
    "config.algorithm.rejection_lows": (probe.estimates, (0.1,), REJECTED),
    "config.algorithm.rejection_highs": (probe.estimates, (1.1,), REJECTED),
    "config.algorithm.old_log_probs": (probe.update_program, "rollout", GROUPS),
    "config.algorithm.safe": (probe.estimates, True, COSTS),
    "config.algorithm.cost_limit": (probe.estimates, 0.5, SAFE),
    "config.algorithm.multiplier_init": (probe.estimates, 2.0, SAFE),
    "config.algorithm.multiplier_lr": (probe.estimates, 0.5, SAFE),
    "config.algorithm.multiplier_max": (probe.estimates, 1.01, SAFE),
    "config.rollout.max_response_tokens": (probe.engine, 20),
    "config.rollout.engine": (probe.engine, "nowhere:Engine"),
    "config.rollout.temperature": (probe.engine, 0.5),
    "config.rollout.top_k": (probe.engine, 3),
    "config.rollout.top_p": (probe.engine, 0.5),
    "config.rollout.min_p": (probe.engine, 0.5),
    "config.rollout.stop_tokens": (probe.engine, (5,)),
    "config.rollout.stop_strings": (probe.engine, ("#",)),
    "config.rollout.suppress_unused_tokens": (probe.engine, False, IMAGES),
    "config.rollout.num_slots": (probe.engine, 4),
    "config.rollout.cache_tokens": (probe.engine, 4096),
    "config.rollout.chunk_steps": (probe.engine, 4),
    "config.rollout.dtype": (probe.engine, "bfloat16"),
    "config.rollout.quantization": (probe.engine, "int8"),
    "config.rollout.cache_dtype": (probe.engine, "fp8"),
    "config.rollout.speculation.draft_tokens": (probe.engine, 2),
    "config.rollout.speculation.ngram_tokens": (probe.engine, 2),
    "config.rewards.functions.NAME.function": (probe.scores, "gsm8k"),
    "config.rewards.functions.NAME.weight": (probe.scores, 3.0),
    "config.rewards.functions.NAME.data_source": (probe.scores, "elsewhere"),
    "config.rewards.models.NAME.path": (probe.networks, "none", JUDGE),
    "config.rewards.models.NAME.pairs": (probe.pairs, ("FILE",), JUDGE),
    "config.rewards.models.NAME.pairs_preset": (
        probe.pairs,
        "hh_rlhf",
        {**JUDGE, "rewards.models": {"NAME": {"pairs": ("FILE",)}}},
    ),
    "config.rewards.models.NAME.weight": (probe.scores, 3.0, JUDGE),
    "config.rewards.models.NAME.data_source": (
        probe.scores,
        "elsewhere",
        JUDGE,
    ),
    "config.rewards.cost_functions.NAME.function": (probe.scores, "gsm8k", COSTS),
    "config.rewards.cost_functions.NAME.weight": (probe.scores, 3.0, COSTS),
    "config.rewards.cost_functions.NAME.data_source": (probe.scores, "elsewhere", COSTS),
    "config.rewards.cost_models.NAME.path": (probe.networks, "none", COST),
    "config.rewards.cost_models.NAME.pairs": (probe.pairs, ("FILE",), COST),
    "config.rewards.cost_models.NAME.pairs_preset": (
        probe.pairs,
        "hh_rlhf",
        {**COST, "rewards.cost_models": {"NAME": {"pairs": ("FILE",)}}},
    ),
    "config.rewards.cost_models.NAME.weight": (probe.scores, 3.0, COST),
    "config.rewards.cost_models.NAME.data_source": (probe.scores, "elsewhere", COST),
    "config.distillation.teachers.NAME.path": (probe.networks, "none", TAUGHT),
    "config.distillation.teachers.NAME.data_source": (probe.lessons, "elsewhere", TAUGHT),
    "config.distillation.loss": (probe.distilled, "k3", TAUGHT),
    "config.distillation.coef": (probe.distilled, 3.0, TAUGHT),
    "config.distillation.top_k": (
        probe.lessons,
        3,
        {**TAUGHT, "distillation.loss": "forward_kl"},
    ),
    "config.agent.tools": (probe.agents, ("python",), TOOLS),
    "config.agent.environments.NAME.environment": (probe.agents, "other:Class", WORLD),
    "config.agent.environments.NAME.address": (probe.agents, "elsewhere", WORLD),
    "config.agent.default": (probe.agents, "tool_agent", WORLD),
    "config.agent.call_format": (probe.agents, "hermes", TOOLS),
    "config.agent.max_turns": (probe.agents, 2, TOOLS),
    "config.agent.max_turn_tokens": (probe.engine, 3),
    "config.agent.max_calls": (probe.agents, 2, TOOLS),
    "config.agent.max_result_characters": (probe.agents, 100, TOOLS),
    "config.agent.cut_results": (probe.agents, "left", TOOLS),
    "config.agent.timeout_s": (probe.agents, 3.0, TOOLS),
    "config.agent.max_tool_s": (probe.agents, 3.0, TOOLS),
    "config.agent.num_processes": (probe.agents, 2, TOOLS),
    "config.agent.episodes_per_process": (probe.agents, 2, TOOLS),
    "config.agent.ray_workers": (probe.agents, 2, TOOLS),
    "config.agent.memory_gib": (probe.agents, 3.0, TOOLS),
    "config.agent.visible": (probe.agents, ("HOME",), TOOLS),
    "config.agent.corpus": (
        probe.agents,
        "other.jsonl",
        {"agent.tools": ("search",), "agent.corpus": "passages.jsonl"},
    ),
    "config.rewards.environment_weight": (probe.scores, 3.0, WORLD),
    "config.rewards.num_workers": (probe.scores, 3),
    "config.rewards.ray_workers": (probe.scores, 3),
    "config.rewards.timeout_s": (probe.scores, 3.0),
    "config.rewards.memory_gib": (probe.scores, 3.0),
    "config.rewards.environment": (probe.scores, ("HOME",)),
    "config.rewards.on_failure": (probe.scores, "score"),
    "config.rewards.unreadable_truths": (probe.readable_truths, "leave_out"),
    "config.rewards.math.percent": (probe.scores, "number", MATH),
    "config.rewards.math.units": (probe.scores, "compare", MATH),
    "config.rewards.math.unboxed_letters": (probe.scores, False, MATH),
    "config.rewards.failure_score": (probe.scores, 3.0),
    "config.warm_start.num_steps": (probe.stages, 3),
    "config.warm_start.batch_size": (probe.stages, 3, WARM),
    "config.warm_start.save_every": (probe.stages, 3, WARM),
    "config.preference.num_steps": (probe.stages, 3),
    "config.preference.batch_size": (probe.stages, 3),
    "config.preference.save_every": (probe.stages, 3),
    "config.curriculum.choice": (probe.curriculum, "success"),
    "config.curriculum.success_score": (probe.curriculum, 1.5, CHOSEN),
    "config.curriculum.memory": (probe.curriculum, 1.0, CHOSEN),
    "config.curriculum.floor": (probe.curriculum, 1.0, CHOSEN),
    "config.placement.choice": (probe.networks, "standalone"),
    "config.placement.balance_every": (probe.balance, 2, POOLS | AHEAD),
    "config.placement.hosts": (probe.pools_of_hosts, "own", POOLS),
    "config.placement.roles": (
        probe.networks,
        POOLS["placement.roles"] | {"critic": "other"},
        POOLS,
    ),
    "config.placement.pools.NAME.devices": (probe.networks, 2, POOLS),
    "config.placement.pools.NAME.stage": (
        probe.networks,
        2,
        {**POOLS, **LAYERS, "placement.pools": {"NAME": {"devices": 8}}, "placement.roles": ALONE},
    ),
    "config.placement.pools.NAME.data": (probe.networks, 2, POOLS),
    "config.placement.pools.NAME.fsdp": (
        probe.networks,
        2,
        FREE,
    ),
    "config.placement.pools.NAME.expert": (probe.networks, 2, POOLS),
    "config.placement.pools.NAME.sequence": (probe.networks, 2, POOLS),
    "config.placement.pools.NAME.tensor": (probe.networks, 2, POOLS),
}

TIMES = ("every", "before", "after")
SUPERVISED = {
    **{
        f"config.router.{name}": (probe.router_losses, 0.5)
        for name in ("balance_coef", "z_coef", "bias_rate")
    },
    **{key: (probe.examples, *rest) for key, (_, *rest) in DATA.items()},
    **SHARED,
    **of_optimizer("trainer.optimizer"),
    "config.data.train_files": (
        probe.examples,
        ("none.jsonl",),
        {"data.task": "gsm8k", "data.train_files": ("FILE",)},
    ),
    "config.data.rewritten_turns": (probe.turns, "whole"),
    "config.data.shuffle": (probe.supervised_batch, False),
    **{
        key: (probe.supervised_batch, *rest)
        for key, (_, *rest) in DATA.items()
        if "weights" in key or "stream" in key
    },
    "config.data.num_workers": (probe.supervised_batch, 2),
    "config.trainer.batch_size": (probe.supervised_batch, 3),
    "config.trainer.max_tokens_per_microbatch": (probe.supervised_batch, 256),
    "config.trainer.max_sequence_tokens": (probe.supervised_batch, 8),
    "config.model.vocab_chunk": (probe.supervised_loss, 8),
    "config.data.eval_files": (
        probe.held_out,
        ("none.jsonl",),
        FILES | {"data.task": "gsm8k"},
    ),
    **{key: row for key, row in RL.items() if key.startswith("config.lora.")},
    **{f"config.evaluation.{name}": RL[f"config.evaluation.{name}"] for name in TIMES},
    "config.evaluation.num_prompts": (probe.supervised_evaluation, 3),
}


@functools.cache
def through_rl(part):
    """Returns the probe of the run of RL that samples as a job does."""
    return lambda config: part(config.as_rl())


SAMPLING = ("config.rollout.", "config.evaluation.", "config.mesh.rollout")
# Of rows that are answered and scored.
SCORED = tuple(f"config.data.{name}" for name in ("answer_pattern", "extra_columns", "data_source"))
POLICY = {
    **SUPERVISED,
    **{key: (through_rl(part), *rest) for key, (part, *rest) in DATA.items() if key in SCORED},
    **{
        key: (through_rl(part), *rest)
        for key, (part, *rest) in RL.items()
        if key.startswith(SAMPLING) and key not in SUPERVISED
    },
    "config.reference.path": (probe.networks, "none"),
    "config.dpo.loss": (probe.dpo_loss, "hinge"),
    "config.dpo.beta": (probe.dpo_loss, 0.5),
    "config.dpo.label_smoothing": (probe.dpo_loss, 0.2),
}
TABLES = {"rl": RL, "sft": POLICY, "dpo": POLICY, "reward_model": SUPERVISED}
KEYS = [(job, key) for job in JOBS for key, _, _ in listed(JOBS[job]) if key != "config.job"]


def again(job, key):
    """Returns whether the same probe is asked for RL."""
    if job == "rl":
        return False
    first = key in SUPERVISED and job != "sft"  # what SFT is asked, the others are asked nightly
    return first or key.startswith(SAMPLING) or SUPERVISED.get(key) == RL.get(key, ())


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What "FILE" and "FOLDER" stand for."""
    folder = tmp_path_factory.mktemp("places")
    character_tokenizer().save_pretrained(folder)
    answers = {"completion": "2", "chosen": "2", "rejected": "3"}
    row = {"data_source": "mine", "prompt": "1+1=", "question": "2+2=", **answers}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    rows = [{"data_source": "all", "prompt": f"{i}+1=", **answers} for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "bare.jsonl").write_text(json.dumps({"prompt": "1+1=", **answers}) + "\n")
    return {
        "BARE": str(folder / "bare.jsonl"),
        "FILE": str(folder / "rows.jsonl"),
        "PROMPTS": str(folder / "prompts.jsonl"),
        "FOLDER": str(folder),
    }


def built(settings, places):
    """Returns a config of dotted keys."""
    values = {}
    for path, value in settings.items():
        *groups, name = path.split(".")
        group = functools.reduce(lambda at, key: at.setdefault(key, {}), groups, values)
        if isinstance(value, tuple):
            value = tuple(places.get(each, each) for each in value)
        group[name] = places.get(value, value) if isinstance(value, str) else copy.deepcopy(value)
    return from_config_dict(values)


def outcome(part, config):
    """Returns what a probe finds, or the error that a user sees, to be compared."""
    try:
        found = part(config)
    except UserError as error:
        return str(error)
    plain = jax.tree.map(lambda a: np.asarray(a).tolist() if hasattr(a, "ndim") else a, found)
    return repr(plain)


KNOWN = {}


def of_base(part, config):
    """Returns `outcome`, found once."""
    known = part, repr(config)
    if known not in KNOWN:
        KNOWN[known] = outcome(part, config)
    return KNOWN[known]


def is_unread(job, name):
    unread = built(BASE[job], {}).unread if job != "rl" else ()
    return any(name == group or name.startswith(f"{group}.") for group in unread)


@pytest.mark.parametrize(
    ("job", "key"),
    [pytest.param(*each, marks=[pytest.mark.nightly] if again(*each) else []) for each in KEYS],
)
def test_every_key_changes_something(job, key, places):
    name = key.removeprefix("config.")
    if is_unread(job, name):
        _, value, *more = RL[key]
        before, after = BASE[job], BASE[job] | dict(*more) | {name: value}
        part = probe.warned
    else:
        part, value, *more = TABLES[job][key]
        before = BASE[job] | dict(*more)
        after = before | {name: value}
    assert of_base(part, built(before, places)) != outcome(part, built(after, places))


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
}


@pytest.mark.parametrize("policy_loss, name", LOSS_ARGS)
def test_every_hyperparameter_changes_its_loss(policy_loss, name, places):
    value, others = LOSS_ARGS[policy_loss, name]
    base = {**BASE["rl"], "algorithm.policy_loss": policy_loss, "algorithm.kl_in": "none"}
    before = base | {"algorithm.loss_args": others}
    after = base | {"algorithm.loss_args": others | {name: value}}
    found = of_base(probe.policy_loss, built(before, places))
    assert found != outcome(probe.policy_loss, built(after, places))


def test_no_hyperparameter_is_left_out():
    assert set(LOSS_ARGS) == {
        (loss, name) for loss in POLICY_LOSSES for name in loss_hyperparameters(loss)
    }


def test_the_tables_hold_no_other_keys():
    assert set(RL) == {key for job, key in KEYS if job == "rl"}
    assert set(SUPERVISED) <= {key for job, key in KEYS if job == "sft"}
    assert set(POLICY) <= {key for job, key in KEYS if job == "dpo"}


def test_a_job_is_of_its_class():
    assert {job: type(built(BASE[job], {})) for job in JOBS} == JOBS


@pytest.mark.parametrize("job", JOBS)
def test_a_dead_key_is_found(job):
    """A probe says nothing of keys that it does not read."""
    before, after = BASE[job], BASE[job] | {"checkpoint.keep": 9}
    assert outcome(probe.networks, built(before, {})) == outcome(probe.networks, built(after, {}))
