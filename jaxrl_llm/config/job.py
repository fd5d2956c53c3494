"""Configs of the jobs: RL, SFT, DPO and reward modeling, with their common base."""

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from jaxrl_llm.config import learner, warnings
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.config.algorithm import AlgorithmConfig, PreferenceLossConfig
from jaxrl_llm.config.kv_cache_sizing import SequenceLengths
from jaxrl_llm.config.logging_config import (
    AlertsConfig,
    CheckpointConfig,
    MetricsConfig,
    ProfilerConfig,
)
from jaxrl_llm.config.placement import MeshConfig, PlacementConfig
from jaxrl_llm.config.rollout_data import (
    VLLM_ENGINE,
    CurriculumConfig,
    DataConfig,
    DistillationConfig,
    EvaluationConfig,
    RewardsConfig,
    RolloutConfig,
)
from jaxrl_llm.config.validation import INT32_MAX, ConfigGroup, Problems, Range
from jaxrl_llm.config.vllm import DEFAULT_VLLM
from jaxrl_llm.errors import ConfigError


class JobConfig(ConfigGroup):
    """Settings common to all jobs, and the properties in which jobs differ.

    Subclasses add their settings. Other modules use these properties and never check the class.
    """

    job: str = ""
    seed: Annotated[int, Range("[0, 4294967295]")] = 0
    model: learner.ModelConfig = learner.ModelConfig()
    lora: learner.LoraConfig = learner.LoraConfig()
    router: learner.RouterLossConfig = learner.RouterLossConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    trainer: learner.TrainerConfig = learner.TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    alerts: AlertsConfig = AlertsConfig()
    profiler: ProfilerConfig = ProfilerConfig()

    # Whether the job learns from samples of its own policy.
    learns_from_samples = False
    # Whether rows may have images; pairs of answers have none.
    reads_images = False
    # The setting behind `sequences_per_update`.
    update_size_setting = "trainer.batch_size"

    @property
    def trained_head(self) -> Literal["lm", "scalar"]:
        """Head of the trained network: "lm" (token log-probs) or "scalar" (a score a sequence)."""
        return "lm"

    @property
    def trained_in_checkpoint(self) -> tuple[str, ...]:
        """Path of the trained weights in a checkpoint's tree."""
        return ("params",)

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum tokens of a sequence, prompt and answer."""
        raise NotImplementedError

    @property
    def sequences_per_update(self) -> int:
        """Rows that one optimizer update learns from."""
        raise NotImplementedError

    @property
    def max_pair_tokens(self) -> int:
        """Maximum tokens of the two answers of a preference pair, with their prompts."""
        return self.max_sequence_tokens

    @property
    def trains_vision_tower(self) -> bool:
        """Whether the policy's vision encoder is trained."""
        return self.reads_images and self.trainer.tower_learning_rate > 0

    @property
    def reference_folder(self) -> str | None:
        """Folder of the frozen reference model; "": the initial policy; None: the job has none.

        RL loads it only if one of the algorithm's functions reads it.
        """
        return None

    @property
    def supervised_router(self) -> learner.RouterLossConfig | None:
        """Router losses during supervised training; None for jobs without them."""
        return None

    @property
    def weighs_by_probability(self) -> bool:
        """Whether SFT weighs each token by its probability (DFT)."""
        return False

    @property
    def preference_loss(self) -> PreferenceLossConfig | None:
        """The loss of preference optimization, in the group `dpo`; None: another job."""
        return None

    @property
    def answers_prompts(self) -> bool:
        """Whether evaluations also sample and score responses, besides the held-out loss."""
        return False

    @property
    def step_contents(self) -> str:
        """Size of a step in words: "32 rows"."""
        raise NotImplementedError

    def as_rl(self) -> "RLConfig":
        """An RL config that samples from and scores this job's policy, for evaluation.

        Raises:
          ConfigError: If the job trains no policy.
        """
        return self.require_rl()

    def require_rl(self) -> "RLConfig":
        """This config if the job is RL; raises ConfigError otherwise."""
        raise ConfigError(f"config.job: {self.job!r} is not supported here; use a run of job='rl'")

    def with_value_defaults(self, values: Mapping[str, Any]) -> Self:
        """Fills in defaults that depend on other settings; `values` are those the user set."""
        return self

    @property
    def microbatch_tokens(self) -> int:
        """Maximum tokens of a microbatch on a device; if unset, enough for one row."""
        return self.trainer.max_tokens_per_microbatch or max(16_384, self.max_sequence_tokens)

    @property
    def max_scored_tokens(self) -> int:
        """Maximum tokens of a sequence that need log-probs; 0: unknown."""
        return 0

    @property
    def num_updates(self) -> int:
        """Number of optimizer updates of the job, the horizon of learning-rate schedules."""
        return self.trainer.num_steps

    @property
    def peak_learning_rates(self) -> dict[str, float]:
        """Peak learning rates of all trained weights, keyed by config path."""
        return {"trainer.optimizer.learning_rate": self.trainer.optimizer.learning_rate}

    def warnings(self) -> Iterator[str]:
        """Yields warnings about settings that have no effect in this job or would ruin it."""
        yield from warnings.trainer_warnings(self.trainer)
        yield from warnings.precision_warnings(self.model, self.lora, self.peak_learning_rates)


class SupervisedConfig(JobConfig):
    """Base of supervised jobs, which evaluate the loss on held-out rows."""

    trainer: learner.SupervisedTrainerConfig = learner.SupervisedTrainerConfig()

    # Common settings and groups that have no effect in this job.
    unread = frozenset({
        "mesh.on_host", "trainer.shared_prompts", "metrics.rollouts_every",
        "metrics.rollout_tokens",
        "alerts.kl", "alerts.reference_kl", "alerts.entropy", "alerts.log_prob_difference",
        "alerts.constant_reward", "alerts.reward_failures",
        "alerts.staleness", "alerts.rollout_idle", "alerts.learner_idle",
    })  # fmt: skip

    @property
    def max_sequence_tokens(self) -> int:
        return self.trainer.max_sequence_tokens

    @property
    def sequences_per_update(self) -> int:
        return self.trainer.batch_size

    @property
    def supervised_router(self) -> learner.RouterLossConfig:
        return self.router

    @property
    def step_contents(self) -> str:
        return f"{self.trainer.batch_size} rows"

    @property
    def has_held_out(self) -> bool:
        """Whether there are held-out rows."""
        return self.data.task in ("arithmetic", "stories", "products") or bool(self.data.eval_files)

    def rules(self) -> Problems:
        yield from learner.network_rules(self.model, self.lora, self.router, self.trainer)
        if self.evaluation.every and not self.has_held_out:
            message = f"{self.evaluation.every}, but no rows are held out; name data.eval_files"
            yield "evaluation.every", f"{message}, or set it to 0"

    def warnings(self) -> Iterator[str]:
        yield from super().warnings()
        for key in sorted(self.unread):
            read = operator.attrgetter(key)
            if read(self) != read(type(self)()):
                yield f"config.{key}: no effect, this job does not read it"


class PolicyConfig(SupervisedConfig):
    """Base of supervised jobs that train a policy; `evaluation.functions` score its responses."""

    rollout: RolloutConfig = RolloutConfig()  # for the evaluation

    # The evaluation has its own.
    unread = SupervisedConfig.unread.union(
        f"rollout.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "support_tokens")
    )

    def rules(self) -> Problems:
        yield from super().rules()
        if self.evaluation.functions and not self.has_held_out:
            yield "evaluation.functions", "no rows are held out; name data.eval_files"

    @property
    def answers_prompts(self) -> bool:
        return self.evaluation.is_enabled and bool(self.evaluation.functions)

    def as_rl(self) -> "RLConfig":
        return RLConfig(
            seed=self.seed,
            model=self.model,
            lora=self.lora,
            data=self.data,
            mesh=self.mesh,
            rollout=self.rollout,
            rewards=RewardsConfig(functions=self.evaluation.functions),
            evaluation=self.evaluation,
            trainer=learner.RLTrainerConfig(
                max_tokens_per_microbatch=self.trainer.max_tokens_per_microbatch
            ),
            checkpoint=self.checkpoint,
        )


class SFTConfig(PolicyConfig):
    """Supervised fine-tuning of the policy."""

    job: Literal["sft"] = "sft"
    loss: Literal["cross_entropy", "dft"] = "cross_entropy"

    reads_images = True

    @property
    def weighs_by_probability(self) -> bool:
        return self.loss == "dft"


class DPOConfig(PolicyConfig):
    """Preference optimization of the policy on pairs of answers, or on answers with a label."""

    job: Literal["dpo"] = "dpo"
    reference: learner.ReferenceConfig = learner.ReferenceConfig()
    dpo: PreferenceLossConfig = PreferenceLossConfig()

    unread = PolicyConfig.unread | {"data.arithmetic_errors", "trainer.tower_learning_rate"}

    def rules(self) -> Problems:
        yield from super().rules()
        yield from self.dpo.batch_rules(self.trainer.batch_size)

    @property
    def preference_loss(self) -> PreferenceLossConfig:
        return self.dpo

    @property
    def reference_folder(self) -> str | None:
        return self.reference.path if self.dpo.reads_reference else None

    def warnings(self) -> Iterator[str]:
        yield from super().warnings()
        yield from warnings.reference_warnings(self.dpo, self.reference)


class RewardModelingConfig(SupervisedConfig):
    """Training of a reward model on pairs of chosen and rejected answers."""

    job: Literal["reward_model"] = "reward_model"

    unread = SupervisedConfig.unread.union({
        "model.vocab_chunk", "mesh.rollout", "data.arithmetic_errors", "evaluation.functions",
        "data.answer_pattern", "data.extra_columns", "data.data_source",
        "evaluation.samples_per_prompt", "evaluation.temperature", "evaluation.top_p",
        "trainer.tower_learning_rate",
    })  # fmt: skip

    @property
    def trained_head(self) -> Literal["lm", "scalar"]:
        return "scalar"


Job = TypeVar("Job", bound=SupervisedConfig)


class RLConfig(JobConfig):
    """A reinforcement learning run with the stages before it."""

    job: Literal["rl"] = "rl"
    curriculum: CurriculumConfig = CurriculumConfig()
    critic: learner.CriticConfig = learner.CriticConfig()
    reference: learner.ReferenceConfig = learner.ReferenceConfig()
    router: learner.RouterConfig = learner.RouterConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    agent: AgentConfig = AgentConfig()
    rewards: RewardsConfig = RewardsConfig()
    distillation: DistillationConfig = DistillationConfig()
    trainer: learner.RLTrainerConfig = learner.RLTrainerConfig()
    warm_start: learner.StageConfig = learner.StageConfig()
    preference: learner.StageConfig = learner.StageConfig()
    placement: PlacementConfig = PlacementConfig()

    learns_from_samples = True
    reads_images = True
    update_size_setting = "trainer.minibatch_size"

    @property
    def trained_in_checkpoint(self) -> tuple[str, ...]:
        return ("policy", "params")

    @property
    def sequences_per_step(self) -> int:
        return self.trainer.prompts_per_step * self.algorithm.samples_per_prompt

    @property
    def max_staleness(self) -> int:
        """Maximum staleness: steps by which a token's weights may lag behind the learner's."""
        return self.trainer.max_staleness if self.trainer.sampling == "async" else 0

    @property
    def minibatch_size(self) -> int:
        return self.trainer.minibatch_size or self.sequences_per_step

    @property
    def reference_folder(self) -> str:
        return self.reference.path

    @property
    def sequences_per_update(self) -> int:
        return self.minibatch_size

    @property
    def num_updates(self) -> int:
        minibatches = self.sequences_per_step // max(1, self.minibatch_size)
        return self.trainer.num_steps * self.trainer.epochs * minibatches

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def max_pair_tokens(self) -> int:
        return 2 * self.max_sequence_tokens  # in RL that is the limit of one sequence

    @property
    def step_contents(self) -> str:
        samples, advantage = self.algorithm.samples_per_prompt, self.algorithm.advantage
        return f"{self.trainer.prompts_per_step} prompts x {samples} samples, {advantage}"

    def require_rl(self) -> "RLConfig":
        return self

    def with_value_defaults(self, values: Mapping[str, Any]) -> Self:
        """Enables importance weights where samples may come from other weights.

        That is the case for stale or quantized weights and for vLLM, unless another correction is
        set.
        """
        algorithm, differs = self.algorithm, self.max_staleness or self.rollout.differs_from_policy
        is_chosen = (values.get("algorithm") or {}).get("correction") is not None
        if is_chosen or not differs or algorithm.corrects or algorithm.old_log_probs == "rollout":
            return self
        algorithm = dataclasses.replace(algorithm, correction="token")
        return dataclasses.replace(self, algorithm=algorithm)

    @property
    def sampled_lengths(self) -> SequenceLengths:
        """Maximum lengths of the sequences that are sampled together."""
        tokens = self.rollout.max_response_tokens, self.data.max_prompt_tokens
        return SequenceLengths(*tokens, self.algorithm.samples_per_prompt)

    @property
    def max_scored_tokens(self) -> int:
        return self.rollout.max_response_tokens

    @property
    def has_scorers(self) -> bool:
        """Whether the run has reward or cost models, or teachers."""
        rewards = self.rewards
        return bool(rewards.models or rewards.cost_models or self.distillation.teachers)

    @property
    def environment_sources(self) -> frozenset[str]:
        """Data sources whose rows are scored by environments; "*": all."""
        return frozenset("*" if self.agent.gives_rewards else "")

    @property
    def sources_without_rewards(self) -> frozenset[str]:
        """Data sources that need no reward function, because of teachers or environments."""
        return self.distillation.data_sources | self.environment_sources

    @property
    def scorer_paths(self) -> list[str]:
        """Folders of reward and cost models, and of teachers."""
        judges = *self.rewards.models.values(), *self.rewards.cost_models.values()
        teachers = self.distillation.teachers.values()
        paths = *(judge.path for judge in judges), *(teacher.path for teacher in teachers)
        return [path for path in paths if path]

    @property
    def evaluation_rewards(self) -> RewardsConfig:
        """Rewards of held-out responses: `evaluation.functions`, or those of training if empty."""
        if not (functions := self.evaluation.functions):
            return self.rewards
        only = RewardsConfig(functions=functions)
        others = ("models", "judges", "cost_functions", "cost_models")
        changes = {name: getattr(only, name) for name in ("functions", *others)}
        return dataclasses.replace(self.rewards, **changes)

    def rules(self) -> Problems:
        sequences, size = self.sequences_per_step, self.minibatch_size
        for where, count, what in (
            ("trainer.prompts_per_step", sequences * self.max_sequence_tokens, "tokens in a step"),
            ("trainer.num_steps", self.num_updates, "updates in the run"),
        ):
            if count > INT32_MAX:
                yield where, f"makes {count} {what}; at most {INT32_MAX} can be, use less"
        yield from self.trainer.minibatch_rules(size, self.algorithm.samples_per_prompt)
        shards = self.mesh.sequence  # -1: not known before the devices are
        too_few = (
            "cannot hold one sequence of data.max_prompt_tokens + rollout.max_response_tokens ="
            f" {self.max_sequence_tokens}; use at least that"
        )
        most, cached = self.trainer.max_tokens_per_microbatch, self.rollout.cache_tokens
        if self.max_sequence_tokens > most * shards > 0:
            yield "trainer.max_tokens_per_microbatch", f"{most} {too_few}"
        if self.max_sequence_tokens > cached > 0:
            yield "rollout.cache_tokens", f"{cached} {too_few}, or 0"
        if self.curriculum.choice and self.data.stream:
            message = "all prompts must be known, but data.stream reads them when they are drawn"
            yield "curriculum.choice", f"{message}; set data.stream=False, or leave the choice out"
        buffer, most = self.algorithm.overlong_buffer_tokens, self.rollout.max_response_tokens
        if buffer > most:
            message = f"{buffer} exceeds rollout.max_response_tokens={most}"
            yield "algorithm.overlong_buffer_tokens", message
        if self.rollout.temperature == 0 and self.algorithm.samples_per_prompt > 1:
            message = "0 (greedy) makes all samples of a prompt the same; set it above 0"
            yield "rollout.temperature", message
        if (size := self.rollout.support_tokens) and self.distillation.teachers:
            message = f"{size}, but teachers' log-probs are of the whole vocabulary; set it to 0"
            yield "rollout.support_tokens", message
        yield from self.rollout.training_problems(self.agent)
        if self.rollout.engine == VLLM_ENGINE:
            temperatures = self.rollout.temperature, self.evaluation.temperature
            yield from self.rollout.vllm.run_rules(*temperatures, self.trainer.schedule)
        yield from learner.network_rules(self.model, self.lora, self.router, self.trainer)
        yield from learner.quantization_rules(
            self.model, self.rollout.quantization, self.rollout.engine, self.warm_start.num_steps
        )
        yield from learner.critic_rules(self.model, self.router, self.critic)
        if self.trainer.optimizer.name == "schedule_free":
            message = "'schedule_free' has its gradient at other weights than those that sample"
            yield "trainer.optimizer.name", f"{message}; use 'adamw' or 'muon'"
        if self.algorithm.safe and not (self.rewards.cost_functions or self.rewards.cost_models):
            message = "algorithm.safe needs a cost: add cost_models or cost_functions"
            yield "rewards.cost_models", message
        if self.router.replay == "scoring" and self.algorithm.old_log_probs == "interpolate":
            yield "router.replay", "'scoring' replays the pass that old_log_probs saves; use 'off'"
        yield from self._teacher_rules()
        yield from self.rewards.term_rules(self.algorithm.dynamic_sampling_term)
        if self.agent.is_used and not self.data.chat_template:
            yield "data.chat_template", "episodes of several turns need one; set it to True"
        if self.placement.balance_every and not self.trainer.is_free_async:
            yield "placement.balance_every", "needs trainer.sampling='async' and schedule='free'"
        if self.trainer.sampling == "async":
            if self.agent.tools or self.agent.environments:
                message = "episodes with tools or environments are sampled in their step"
                yield "trainer.sampling", f"{message}; use 'sync'"
            if self.agent.harness and self.trainer.schedule != "free":
                message = "when a harness sends its requests cannot be recorded; use 'free'"
                yield "trainer.schedule", message
        yield from self.agent.advantage_rules(self.algorithm.advantage)
        if self.agent.max_turn_tokens > self.rollout.max_response_tokens:
            message = f"{self.agent.max_turn_tokens} exceeds rollout.max_response_tokens="
            yield "agent.max_turn_tokens", f"{message}{self.rollout.max_response_tokens}"
        yield from self.alerts.skip_rules(
            engine_log_probs=self.algorithm.old_log_probs != "recompute",
            one_update=self.num_updates == self.trainer.num_steps,
            calls_rewards=bool(self.rewards.functions or self.rewards.cost_functions),
        )
        tasks = "arithmetic", "files"
        for group in ("models", "cost_models"):
            for name, model in getattr(self.rewards, group).items():
                if not model.path and not self.preference.num_steps:
                    message = "required: a folder, or preference.num_steps > 0 to train one first"
                    yield f"rewards.{group}.{name}.path", message
                elif not model.path and not model.pairs and self.data.task not in tasks:
                    message = f"needs preference pairs; data.task={self.data.task!r} has none"
                    yield f"rewards.{group}.{name}.pairs", f"{message}, name files of them"

    def _teacher_rules(self) -> Problems:
        if self.rewards.reward_terms or self.agent.gives_rewards:
            return
        if not self.distillation.teachers:
            message = "no reward at all; add rewards.functions or rewards.models, or"
            yield "rewards.functions", f"{message} distillation.teachers or agent.environments"
        elif self.algorithm.dynamic_sampling:
            message = "drops groups of equal rewards, but the run has no reward; set it to False"
            yield "algorithm.dynamic_sampling", message
        if self.evaluation.is_enabled and not self.evaluation.functions:
            message = "the run has no reward that could score held-out answers; name a function,"
            yield "evaluation.functions", f"{message} or set before, after and every to nothing"

    @property
    def peak_learning_rates(self) -> dict[str, float]:
        rates = super().peak_learning_rates
        if self.algorithm.advantage == "gae":
            rates["critic.optimizer.learning_rate"] = self.critic.optimizer.learning_rate
        for name in ("warm_start", "preference"):
            stage: learner.StageConfig = getattr(self, name)
            if stage.num_steps:
                rates[f"{name}.optimizer.learning_rate"] = stage.optimizer.learning_rate
        return rates

    def warnings(self) -> Iterator[str]:
        algorithm, longest = self.algorithm, self.rollout.max_response_tokens
        yield from super().warnings()
        yield from warnings.sampling_warnings(self.rollout)
        yield from warnings.algorithm_warnings(algorithm, longest)
        yield from warnings.reward_warnings(self.rewards, self.agent.gives_rewards)
        yield from self.agent.warnings()
        distillation, default = self.distillation, DistillationConfig()
        reads = {"top_k": distillation.compares_lists, "jsd_beta": distillation.loss == "jsd"}
        for name in ("loss", "coef", "top_k", "jsd_beta"):
            read = reads.get(name, True)
            if distillation.teachers and read:
                continue
            if getattr(distillation, name) != getattr(default, name):
                reason = f"loss is {distillation.loss!r}" if distillation.teachers else "no teacher"
                yield f"config.distillation.{name}: no effect, {reason}"
        costs = sorted({**self.rewards.cost_functions, **self.rewards.cost_models})
        if costs and not algorithm.safe:
            yield f"config.rewards: costs {costs} have no effect, algorithm.safe is off"
        if self.curriculum.choice and not self.data.shuffle:
            yield "config.data.shuffle: no effect, curriculum.choice says which prompts come"
        if self.rollout.engine != VLLM_ENGINE and self.rollout.vllm != DEFAULT_VLLM:
            yield f"config.rollout.vllm: no effect, rollout.engine is {self.rollout.engine!r}"
        yield from self._staleness_warnings()
        if self.rollout.differs_from_policy and not algorithm.corrects:
            source = "rounded weights or keys" if self.rollout.is_rounded else "another program"
            message = f"nothing corrects for samples of {source}; use 'token'"
            yield f"config.algorithm.correction: 'none', {message}"
        if algorithm.old_log_probs == "rollout" and algorithm.correction != "none":
            yield "config.algorithm.correction: weights are all 1, old_log_probs is 'rollout'"

    def _staleness_warnings(self) -> Iterator[str]:
        trainer, default = self.trainer, learner.RLTrainerConfig()
        for name in ("max_staleness", "new_weights") if trainer.sampling == "sync" else ():
            if getattr(trainer, name) != getattr(default, name):
                yield f"config.trainer.{name}: no effect, trainer.sampling is 'sync'"
        algorithm = self.algorithm
        if self.max_staleness and algorithm.old_log_probs == "recompute" and not algorithm.corrects:
            message = "samples of older weights count as if the newest had drawn them; use 'token'"
            yield f"config.algorithm.correction: 'none', {message}"

    def stage(self, stage: learner.StageConfig, job: type[Job], longest: int) -> Job:
        """The job of a supervised stage before RL; `longest` is the maximum sequence length."""
        return job(
            seed=self.seed,
            model=dataclasses.replace(self.model, quantization="none"),  # it trains all weights
            data=self.data,
            mesh=self.mesh,
            trainer=learner.SupervisedTrainerConfig(
                num_steps=stage.num_steps,
                batch_size=stage.batch_size,
                max_sequence_tokens=longest,
                max_tokens_per_microbatch=self.trainer.max_tokens_per_microbatch,
                optimizer=stage.optimizer,
            ),
            evaluation=EvaluationConfig(before=False, after=False),
            checkpoint=dataclasses.replace(
                self.checkpoint, every=stage.save_every, keep=1, best_metric=""
            ),
            metrics=self.metrics,
            alerts=self.alerts,
        )
