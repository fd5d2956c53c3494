"""Data, rollout, rewards, distillation and evaluation settings."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.config.datasets.presets import PRESETS, Preset, RowMapping, pair_problems
from jaxrl_llm.config.datasets.slices import overlap_problem
from jaxrl_llm.config.judges import JudgeConfig
from jaxrl_llm.config.validation import (
    Coefficient,
    ConfigGroup,
    Every,
    ModelPath,
    Name,
    Problems,
    Range,
    Real,
    RowFiles,
    Tokens,
)
from jaxrl_llm.config.vllm import DEFAULT_VLLM, VllmConfig

# The lowest temperature above 0 (greedy). Float32 logits have an error of about 2e-6, which at
# lower temperatures would decide which token is sampled.
MIN_TEMPERATURE = 1e-4
MAX_SUPPORT_TOKENS = 1024
NUM_PRODUCTS = 90 * 90  # pairs of two-digit numbers
PREFILL_CHUNK_TOKENS = 2048  # chunked prefill: maximum tokens of a prompt in one pass
Temperature = Annotated[float, Range(f"0 or [{MIN_TEMPERATURE}, 1000]", "0: greedy")]
Token = Annotated[int, Range("[0, 2147483647]")]  # and in the vocabulary
Weight = Annotated[float, Range("[0, 1000000]")]


MAPPING_FIELDS = tuple(field.name for field in dataclasses.fields(RowMapping))  # of DataConfig
WEIGHT_FIELDS = ("train_weights", "last_train_weights", "last_train_weights_after")


class ReasoningGymConfig(ConfigGroup):
    """The task "reasoning_gym": generated problems of the package of that name (docs/worlds.md)."""

    # Names of generators, each with settings of its own as JSON after a space if wanted:
    # 'chain_sum {"max_terms": 3}'; "all": every one that makes problems without settings.
    generators: tuple[Name, ...] = ()
    # Levels of each generator's curriculum, easiest first; see curriculum.choice="levels".
    levels: Annotated[int, Range("[0, 100]", "0: its default difficulty")] = 0
    # What the model is told first, by the package's name of it. "none": nothing, and the whole
    # response is the answer, not the text in <answer>...</answer>.
    system_prompt: Literal["default", "DeepSeekZero", "simple", "direct", "none"] = "default"

    def rules(self) -> Problems:
        for i, text in enumerate(self.generators):
            name, _, settings = text.partition(" ")
            if settings:
                try:
                    is_object = isinstance(json.loads(settings), dict)
                except (ValueError, RecursionError):
                    is_object = False
                if not is_object:
                    rule = "after the name comes a JSON object, or nothing"
                    yield f"generators[{i}]", f"{settings!r} is none; {rule}"
            if self.generators.count(text) > 1:
                yield f"generators[{i}]", f"{name!r} stands twice; leave one out"
        if "all" in self.generators and len(self.generators) > 1:
            yield "generators", "'all' includes the others; leave them or it out"


DEFAULT_REASONING_GYM = ReasoningGymConfig()


class DataConfig(ConfigGroup):
    """The source of prompts."""

    task: Literal[
        "arithmetic", "stories", "products", "shapes", "gsm8k", "files", "reasoning_gym", "seeds"
    ] = "arithmetic"
    # Parquet, jsonl, json or csv files, the last three also as .gz or .zst; folders of them, globs
    # ("a/*.parquet", "**"); each with a slice of its rows if wanted ("train.parquet[:90%]").
    train_files: tuple[RowFiles, ...] = ()
    # How often rows of each of `train_files` come, relative to the others. Empty: as they are.
    train_weights: tuple[Weight, ...] = ()
    # The weights that these become, in a line, while so many rows are drawn. Empty: they stay.
    last_train_weights: tuple[Weight, ...] = ()
    last_train_weights_after: Every = 0
    # Files are read piece by piece (parquet, jsonl), a row when it is needed: more than memory
    # holds. Otherwise all rows are read and checked at the start.
    stream: bool = False
    eval_files: tuple[RowFiles, ...] = ()
    # The layout of a published dataset, which sets the eight fields below; what you set replaces it
    # (docs/data.md).
    preset: Preset = "none"
    # Which column of the files is which of ours: {"prompt": "question", "answer": "solution"}. A
    # name that ends in "?" is of a column that a row may lack.
    columns: Mapping[str, Name] = dataclasses.field(default_factory=dict)
    # The prompt of a row, with its columns in braces: "{question} Answer with a number."
    prompt_template: str = ""
    system_prompt: str = ""  # of dialogues that begin with no system message
    # A regular expression with one group: its last match in columns.answer is the ground truth.
    answer_pattern: str = ""
    # Columns that reward functions get in extra_info. Empty: all that nothing else reads.
    extra_columns: tuple[Name, ...] = ()
    # Speakers of dialogues that are one text, as "Human:user": a turn begins with a blank line and
    # "Human:".
    transcript_roles: tuple[Name, ...] = ()
    data_source: Name = ""  # of rows without a column data_source
    prompt_column: Name = "prompt"
    # Roles of messages that mean another one, as "human:user" or "gpt:assistant". A role that the
    # chat template does not know is refused; "critic:critic" lets it pass as it is.
    role_aliases: tuple[Name, ...] = ()
    max_prompt_tokens: Tokens = 256
    # Prompts of more than `max_prompt_tokens`, and rows with answers of more than
    # `trainer.max_sequence_tokens`: dropped, an error, or cut at that side.
    long_rows: Literal["drop", "error", "left", "right", "middle"] = "drop"
    # Answers that the chat template writes in another way once others follow (Qwen3 drops their
    # thinking). "split": each turn is trained in the context in which it is sampled, the rewritten
    # ones in sequences of their own. "whole": one sequence, as the template writes the whole
    # dialogue; the turns that lose something are counted in a warning.
    rewritten_turns: Literal["split", "whole"] = "split"
    shuffle: bool = True
    chat_template: bool = True  # False: message contents are joined by newlines
    num_workers: Annotated[int, Range("[0, 1024]")] = 0  # threads that prepare rows ahead
    # The built-in tasks: sums of digits, and of word problems, with step-by-step solutions; and
    # products of two numbers of two digits, with a calculator; and drawn shapes to be counted, for
    # models that read images. The numbers of prompts are those of "reasoning_gym" and "seeds" too.
    arithmetic_terms: Annotated[int, Range("[2, 16]")] = 3
    arithmetic_train_prompts: Annotated[int, Range("[1, 1000000]")] = 512
    arithmetic_eval_prompts: Annotated[int, Range("[1, 1000000]")] = 128
    # Share of worked examples with an error.
    arithmetic_errors: Annotated[float, Range("[0, 1)")] = 0.0

    reasoning_gym: ReasoningGymConfig = DEFAULT_REASONING_GYM

    def rules(self) -> Problems:
        if self.task == "reasoning_gym" and not self.reasoning_gym.generators:
            message = "required by task='reasoning_gym': names of its generators, or 'all'"
            yield "reasoning_gym.generators", message
        if self.stream and self.task != "files":
            yield "stream", f"task={self.task!r} does not stream; use task='files'"
        yield from self._weight_rules()
        if self.task in ("gsm8k", "files") and not self.train_files:
            yield "train_files", f"task={self.task!r} reads files, none given"
        yield from self._slice_rules()
        yield from self._mapping_rules()
        yield from pair_problems("role_aliases", self.role_aliases, "human:user")
        num_prompts = self.arithmetic_train_prompts + self.arithmetic_eval_prompts
        if self.task == "products" and num_prompts > NUM_PRODUCTS:
            message = (
                f"and arithmetic_eval_prompts={self.arithmetic_eval_prompts} are {num_prompts}"
            )
            yield (
                "arithmetic_train_prompts",
                f"{self.arithmetic_train_prompts} {message} different prompts, but there are only"
                f" {NUM_PRODUCTS} products; use fewer",
            )
        if self.task == "arithmetic" and 10**self.arithmetic_terms < num_prompts:
            yield (
                "arithmetic_train_prompts",
                f"{self.arithmetic_train_prompts} and arithmetic_eval_prompts="
                f"{self.arithmetic_eval_prompts} are {num_prompts} different prompts, but"
                f" arithmetic_terms={self.arithmetic_terms} digits make only"
                f" {10**self.arithmetic_terms} sums; use fewer prompts or more terms",
            )

    @property
    def row_mapping(self) -> RowMapping:
        """How columns of the files become rows: the preset, and the settings over it."""
        return self._own_mapping.with_preset(PRESETS[self.preset])

    @property
    def _own_mapping(self) -> RowMapping:
        return RowMapping(**{name: getattr(self, name) for name in MAPPING_FIELDS})

    def with_pairs(self, files: tuple[str, ...], preset: Preset) -> "DataConfig":
        """The config of preference pairs in other files, which have columns of their own."""
        own = {field: getattr(DataConfig(), field) for field in (*MAPPING_FIELDS, *WEIGHT_FIELDS)}
        changes = {**own, "task": "files", "train_files": files, "preset": preset}
        return dataclasses.replace(self, **changes)

    def _slice_rules(self) -> Problems:
        for i, file in enumerate(self.eval_files):
            for other in self.train_files:
                if problem := overlap_problem(file, other):
                    yield f"eval_files[{i}]", f"{file} {problem}"

    def _mapping_rules(self) -> Problems:
        names = [n for n in MAPPING_FIELDS if getattr(self, n)]
        names += ["preset"] if self.preset != "none" else []
        if names and self.task != "files":
            message = f"task={self.task!r} has rows of its own"
            yield names[-1], f"{message}; use task='files', or leave it out"
        mapping = self._own_mapping
        if problems := list(mapping.problems()):
            yield from problems
            return
        mapping = self.row_mapping
        if self.answer_pattern and "answer" not in mapping.columns:
            yield "answer_pattern", "nothing is searched for it; name columns.answer"
        if {"messages", "completion"} <= set(mapping.columns):
            message = "messages and completion are both set, and the rows of SFT are one of them"
            yield "columns", f"{message}; leave one out"
        if self.prompt_column != "prompt" and ("prompt" in self.columns or self.prompt_template):
            yield "prompt_column", "columns.prompt or prompt_template says it already; leave it out"

    def _weight_rules(self) -> Problems:
        for name in ("train_weights", "last_train_weights"):
            weights = getattr(self, name)
            if weights and len(weights) != len(self.train_files):
                message = f"{len(weights)} weights for {len(self.train_files)} train_files"
                yield name, f"{message}; give one for each"
            elif weights and not any(weights):
                yield name, "all weights are 0; one at least must be above 0"
        if self.train_weights and self.task != "files":
            yield "train_weights", f"task={self.task!r} is no mixture of files; use task='files'"
        if self.last_train_weights and not self.train_weights:
            yield "last_train_weights", "nothing moves to them; set train_weights too"
        if bool(self.last_train_weights) != bool(self.last_train_weights_after):
            message = "how many rows are drawn until last_train_weights hold"
            yield "last_train_weights_after", f"{message}: set both, or none of them"


class CurriculumConfig(ConfigGroup):
    """Which training prompts come next, by the scores of earlier answers (docs/data.md)."""

    # "success": mostly prompts that are solved now and then; "unsolved": no prompt that is solved
    # nine times of ten; "levels": those of the lowest level that is not mastered yet; or a function
    # of yours. "": each comes once in a pass.
    choice: Name = ""
    success_score: Real = 0.5  # an answer with at least this score is a success
    # What earlier answers to a prompt count when it is answered again; 1: as much as the latest.
    memory: Annotated[float, Range("[0, 1]")] = 0.5
    # Least weight of a prompt under "success", where 1 is that of one solved half of the time.
    floor: Annotated[float, Range("(0, 1]")] = 0.05

    def rules(self) -> Problems:
        known = "success", "unsolved", "levels"
        if self.choice not in ("", *known) and ":" not in self.choice:
            remedy = "or your own as 'package.module:function' or 'path/file.py:function'"
            names = ", ".join(known)
            yield "choice", f"unknown choice {self.choice!r}; known: {names}; {remedy}"


NO_CURRICULUM = CurriculumConfig()


class SpeculationConfig(ConfigGroup):
    """Speculative decoding: draft tokens from the sequence itself, checked in one pass.

    It is faster if responses repeat their prompts or themselves and few slots decode. The samples
    do not change.
    """

    draft_tokens: Annotated[int, Range("[0, 16]", "0: off")] = 0  # draft tokens per decode step
    # Maximum length of the suffix that is searched in the sequence.
    ngram_tokens: Annotated[int, Range("[1, 16]")] = 3


NO_SPECULATION = SpeculationConfig()


BUILT_IN_ENGINE, VLLM_ENGINE = "jaxrl_llm", "vllm"


class RolloutConfig(ConfigGroup):
    """How responses are sampled."""

    # The sampling engine: the built-in one, "vllm" (docs/vllm.md), or your own as
    # 'package.module:factory' or 'path/file.py:factory' (docs/custom_engine.md).
    engine: Name = BUILT_IN_ENGINE
    max_response_tokens: Tokens = 256
    temperature: Temperature = 1.0
    top_k: Annotated[int, Range("[0, 2147483647]", "0: off")] = 0
    top_p: Annotated[float, Range("(0, 1]")] = 1.0
    min_p: Annotated[float, Range("[0, 1)")] = 0.0
    # Draw each token among at most so many of the likeliest that top_k, top_p and min_p keep, and
    # train with log-probs renormalized over these (the "keep sampling mask" of arXiv:2512.02556).
    # 0: among all that they keep, while log-probs are of the whole vocabulary.
    support_tokens: Annotated[int, Range(f"[0, {MAX_SUPPORT_TOKENS}]", "0: off")] = 0
    # JSON schema that the text of every response follows (structured outputs): the schema, or the
    # path of a file with it. Needs `support_tokens`: log-probs are over the allowed tokens among
    # which each was drawn. "": any text.
    schema: str = ""
    stop_tokens: tuple[Token, ...] = ()  # besides the tokenizer's end of sequence
    stop_strings: tuple[str, ...] = ()  # a response ends with the token that completes one
    # Never sample token ids without a text: those that the tokenizer lacks (padded vocabularies)
    # and marks of images. Log-probs, in training too, are of the distribution over the others.
    suppress_unused_tokens: bool = True
    # Sequences decoded at the same time; 0: chosen from the workload and the memory.
    num_slots: Annotated[int, Range("[0, 65536]", "0: chosen")] = 0
    # Tokens in the KV cache of all sequences that are decoded; those that samples of a prompt
    # share count once. 0: so that all slots may hold the longest, or as many as the memory holds.
    # When it is full, the sequence that began last waits and is read again.
    cache_tokens: Annotated[int, Range("[0, 2147483647]", "0: chosen")] = 0
    # Keys and values of a prompt's beginning are those of an earlier prompt of the step, if both
    # have the same tokens there (a page or more). Without effect where expert routes are kept.
    prefix_caching: bool = True
    # What layers with sliding windows or chunked attention keep of a sequence: "window", the tokens
    # that they still attend to, or "sequence", all, as other layers. A window is kept by decode
    # slot, not in shared pages: there is no prefix caching then, and an episode goes on from its
    # slot until another needs that, else it is read again. "auto": "window" in runs without
    # episodes. Sequences that are shorter than two windows are always kept whole.
    window_cache: Literal["auto", "window", "sequence"] = "auto"
    # Decode steps between two checks by the host.
    chunk_steps: Annotated[int, Range("[1, 128]")] = 16
    dtype: Literal["compute", "float32", "bfloat16"] = "compute"
    # Weights of layers in eight bits, a step for each output; embedding, head, routers and norms
    # keep `dtype`. The samples are then corrected for by default (algorithm.correction).
    quantization: Literal["none", "int8", "fp8"] = "none"
    # Of keys and values; "rollout": as `dtype`.
    cache_dtype: Literal["rollout", "float32", "bfloat16", "fp8"] = "rollout"
    speculation: SpeculationConfig = NO_SPECULATION
    vllm: VllmConfig = DEFAULT_VLLM

    def keeps_windows_only(self, agent: AgentConfig) -> bool:
        """Whether layers keep no more than their attention windows of a sampled sequence."""
        if self.window_cache == "auto":
            return not agent.is_used
        return self.window_cache == "window"

    @property
    def differs_from_policy(self) -> bool:
        """Whether log-probs of the engine differ from the policy's by more than its dtype."""
        return self.is_rounded or self.engine == VLLM_ENGINE

    @property
    def is_rounded(self) -> bool:
        """Whether sampling computes with fewer digits than its `dtype` has."""
        return self.quantization != "none" or self.cache_dtype == "fp8"

    def rules(self) -> Problems:
        if self.engine not in (BUILT_IN_ENGINE, VLLM_ENGINE) and ":" not in self.engine:
            remedy = "or your own as 'package.module:factory' or 'path/file.py:factory'"
            names = f"{BUILT_IN_ENGINE}, {VLLM_ENGINE}"
            yield "engine", f"unknown engine {self.engine!r}; known: {names}; {remedy}"
        for name in ("stop_tokens", "stop_strings"):
            if (count := len(getattr(self, name))) > 8:
                yield name, f"at most 8, got {count}"
        if self.schema:
            yield from self._schema_problems()
        if "" in self.stop_strings:
            yield "stop_strings", "one is empty and would end every response; leave it out"

    @property
    def json_schema(self) -> Mapping[str, Any]:
        """The schema of responses.

        Raises:
          ValueError: If it is no JSON object.
          OSError: If its file cannot be read.
        """
        text = self.schema
        if not text.lstrip().startswith("{"):
            text = pathlib.Path(text).read_text(encoding="utf-8")
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise ValueError(f"is {type(schema).__name__}, not an object")
        return schema

    def training_problems(self, agent: AgentConfig) -> Problems:
        """Problems of a run that trains on its samples, which these agents may draw."""
        constraints = {"rollout.schema": self.schema, "agent.strict_tools": agent.strict_tools}
        for name in (name for name, is_set in constraints.items() if is_set):
            if not self.support_tokens:
                message = "needs rollout.support_tokens, for example 64: else the learner's"
                yield name, f"{message} log-probs would count tokens that are forbidden"
        if self.schema and agent.is_used:
            message = "is for responses of one turn; use agent.strict_tools, or in an agent.harness"
            yield "rollout.schema", f"{message} strict tools or response_format"
        if agent.strict_tools and self.engine != BUILT_IN_ENGINE:
            message = f"only the built-in engine follows schemas, not {self.engine!r}"
            yield "agent.strict_tools", message

    def _schema_problems(self) -> Problems:
        try:
            _ = self.json_schema
        except (OSError, ValueError, RecursionError) as error:
            message = f"cannot be read as a JSON schema: {error}; give a schema {{...}} or its file"
            yield "schema", message
        if self.engine != BUILT_IN_ENGINE:
            yield "schema", f"only the built-in engine follows it, not {self.engine!r}"


class RewardFunctionConfig(ConfigGroup):
    """One reward function and its weight in the score."""

    # arithmetic, gsm8k, math, exact_match, code, format, length; or an import or file path.
    function: str = ""
    weight: Real = 1.0
    data_source: Name = "*"  # rows that it scores; "*": all

    def rules(self) -> Problems:
        if not self.function:
            yield "function", "required: a built-in name or 'path/file.py:function'"


class RewardModelConfig(ConfigGroup):
    """One reward (or cost) model on the mesh and its weight in the score."""

    path: ModelPath = ""  # Hugging Face one-label classifier; "": trained first, see `preference`
    # Files of preference pairs that a model without a folder learns from; empty: those of the task.
    # Of a cost model, the chosen answer is the one that costs less.
    pairs: tuple[RowFiles, ...] = ()
    pairs_preset: Preset = "none"  # the layout of these files, as data.preset
    weight: Real = 1.0
    data_source: Name = "*"

    def rules(self) -> Problems:
        if self.path and self.pairs:
            yield "pairs", "the model of `path` is not trained before RL; leave one of them out"
        if self.pairs_preset != "none" and not self.pairs:
            yield "pairs_preset", "is of the files in `pairs`; name some, or leave it out"


class MathConfig(ConfigGroup):
    """How the reward function `math` compares answers (docs/answers.md)."""

    # 28% equals 28 and 0.28, 28 alone, or 0.28 alone.
    percent: Literal["either", "number", "fraction"] = "either"
    # Units of answers are dropped, or must be those of the ground truth; none is converted.
    units: Literal["ignore", "compare"] = "ignore"
    # Whether the letter of a choice counts without a box: "The answer is (C)."
    unboxed_letters: bool = True


DEFAULT_MATH = MathConfig()


class RewardsConfig(ConfigGroup):
    """The score of a response: the weighted sum of all terms for its data source."""

    functions: Mapping[str, RewardFunctionConfig] = dataclasses.field(default_factory=dict)
    models: Mapping[str, RewardModelConfig] = dataclasses.field(default_factory=dict)
    judges: Mapping[str, JudgeConfig] = dataclasses.field(default_factory=dict)
    cost_functions: Mapping[str, RewardFunctionConfig] = dataclasses.field(default_factory=dict)
    cost_models: Mapping[str, RewardModelConfig] = dataclasses.field(default_factory=dict)
    math: MathConfig = DEFAULT_MATH  # of the function `math`
    environment_weight: Real = 1.0  # of what environments give (docs/agents.md)
    num_workers: Annotated[int, Range("[1, 1024]")] = 2  # worker processes
    # Workers of a Ray cluster in place of this host; the processes above are those of each.
    ray_workers: Annotated[int, Range("[0, 65536]", "0: this host")] = 0
    timeout_s: Annotated[float, Range("[0.01, 1000000]")] = 10.0  # of one call
    # Address space of a worker process.
    memory_gib: Annotated[float, Range("[0.5, 1000000] or inf", "inf: no limit")] = 16.0
    environment: tuple[Name, ...] = ()  # environment variables that the workers may see
    # A call that fails: the run stops, the response gets `failure_score`, or the response is left
    # out: it is in no group's mean and has no gradient.
    on_failure: Literal["stop", "score", "leave_out"] = "stop"
    # Rows whose ground truth their reward function cannot read (docs/answers.md): an error before
    # anything is loaded, or left out and counted.
    unreadable_truths: Literal["refuse", "leave_out"] = "refuse"
    failure_score: Annotated[float, Range("[-3.4e38, 3.4e38]")] = 0.0  # the range of float32

    def rules(self) -> Problems:
        if shared := set(self.judges) & {*self.functions, *self.models}:
            yield "judges", f"names used twice: {', '.join(sorted(shared))}"
        for kind in ("", "cost_"):
            functions, models = getattr(self, f"{kind}functions"), getattr(self, f"{kind}models")
            if shared := set(functions) & set(models):
                yield f"{kind}models", f"names used twice: {', '.join(sorted(shared))}"

    @property
    def reward_terms(self) -> dict[str, RewardFunctionConfig | RewardModelConfig | JudgeConfig]:
        """The terms of the score, without those of environments and costs."""
        return {**self.functions, **self.models, **self.judges}

    def term_rules(self, name: str) -> Problems:
        """Yields a problem if dynamic sampling compares a term that there is not; "": the score."""
        known = *self.reward_terms, "environment"
        if name and name not in known:
            message = f"no reward term {name!r}; known: {', '.join(known)}"
            yield "algorithm.dynamic_sampling_term", message


class TeacherConfig(ConfigGroup):
    """A teacher: a frozen language model with the policy's tokenizer."""

    path: ModelPath = ""
    data_source: Name = "*"  # rows that it teaches; "*": those that no other one teaches

    def rules(self) -> Problems:
        if not self.path:
            yield "path", "required: the folder or name of a language model"


class DistillationConfig(ConfigGroup):
    """Teachers of the policy on the tokens that it samples, with or without rewards."""

    teachers: Mapping[str, TeacherConfig] = dataclasses.field(default_factory=dict)
    # The divergence from the teacher: reverse KL as advantage of each token, the estimate k3 of
    # sampled tokens as a loss, or forward KL or the generalized Jensen-Shannon divergence over the
    # teacher's likeliest tokens as a loss.
    loss: Literal["reverse_kl", "k3", "forward_kl", "jsd"] = "reverse_kl"
    coef: Coefficient = 1.0
    # The teacher's part in the mixture of "jsd"; near 0 it is like forward KL, near 1 reverse KL.
    jsd_beta: Annotated[float, Range("(0, 1)")] = 0.5
    # Tokens of "forward_kl" and "jsd" that the teacher lists; all others are one bucket.
    top_k: Annotated[int, Range("[1, 1024]")] = 32

    @property
    def num_listed(self) -> int:
        """Tokens of which a teacher tells the log-probs, in place of each token."""
        return self.top_k if self.compares_lists else 1

    @property
    def compares_lists(self) -> bool:
        """Whether the loss is over the teacher's likeliest tokens, not the sampled one."""
        return self.loss in ("forward_kl", "jsd")

    @property
    def data_sources(self) -> frozenset[str]:
        """Of the rows that have a teacher; "*": all."""
        return frozenset(teacher.data_source for teacher in self.teachers.values())

    def teacher_for(self, data_source: str) -> str:
        """Returns the name of the teacher of such rows; "" if they have none."""
        by_source = {teacher.data_source: name for name, teacher in self.teachers.items()}
        return by_source.get(data_source, by_source.get("*", ""))

    def rules(self) -> Problems:
        teachers_by_source: dict[str, str] = {}
        for name, teacher in self.teachers.items():
            if other := teachers_by_source.get(teacher.data_source):
                message = f"{teacher.data_source!r} has a teacher, {other!r}; give it one"
                yield f"teachers.{name}.data_source", message
            teachers_by_source[teacher.data_source] = name
        if self.teachers and not self.coef:
            yield "coef", "0: nothing would be learned from the teachers; raise it, or name none"


class EvaluationConfig(ConfigGroup):
    """Held-out evaluation: mean@k, pass@k and maj@k per data source."""

    # Reward functions of the evaluation. Empty: those of `rewards`.
    functions: Mapping[str, RewardFunctionConfig] = dataclasses.field(default_factory=dict)
    # RL steps.
    every: Annotated[int, Range("[0, 2147483647]", "0: only before and after")] = 0
    before: bool = True
    after: bool = True
    num_prompts: Annotated[int, Range("[0, 2147483647]", "0: all")] = 0
    samples_per_prompt: Annotated[int, Range("[1, 65536]")] = 1
    temperature: Temperature = 0.0
    top_p: Annotated[float, Range("(0, 1]")] = 1.0

    @property
    def is_enabled(self) -> bool:
        """Whether the run has any evaluation."""
        return self.before or self.after or self.every > 0

    def rules(self) -> Problems:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            message = f"{self.samples_per_prompt} greedy samples are all the same"
            yield "samples_per_prompt", f"{message}; set evaluation.temperature above 0"
