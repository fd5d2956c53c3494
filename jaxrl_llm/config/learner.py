"""The networks of a run and how they learn: weights, dtypes, adapters, optimizers, steps."""

import math
from typing import Annotated, Literal

from jaxrl_llm.config.optimizer import OptimizerConfig
from jaxrl_llm.config.rollout_data import BUILT_IN_ENGINE
from jaxrl_llm.config.stop_condition import stop_condition
from jaxrl_llm.config.validation import (
    INT32_MAX,
    ConfigGroup,
    Count,
    Every,
    File,
    ModelPath,
    Name,
    Problems,
    Range,
    Tokens,
)

ATTENTION_INTERVAL = 4  # of hybrid models: layers from one attention layer to the next
Width = Annotated[int, Range("[1, 16777216]")]


class VisionConfig(ConfigGroup):
    """Vision encoder of a randomly initialized model; that of a folder follows the folder."""

    hidden_size: Width = 64  # features of a patch
    num_layers: Annotated[int, Range("[1, 1024]")] = 2  # every other one sees the whole image
    num_heads: Annotated[int, Range("[1, 65536]")] = 4  # of each layer's attention
    mlp_size: Width = 128  # features inside each layer's MLP
    patch_size: Annotated[int, Range("[1, 1024]")] = 4  # pixels a side; four patches are a token
    # Pixels a side; of qwen2_5_vl: layers of qwen3_vl all see the whole image.
    window_size: Annotated[int, Range("[1, 65536]")] = 16

    def rules(self) -> Problems:
        if self.hidden_size % (4 * self.num_heads):
            message = (
                f"heads of {self.hidden_size} / {self.num_heads} dims; a multiple of 4 is needed"
            )
            yield "num_heads", message
        if self.window_size < 2 * self.patch_size:
            yield "window_size", f"less than the {2 * self.patch_size} pixels of one token"


class ModelConfig(ConfigGroup):
    """The policy network: a Hugging Face folder, or random weights of a given shape."""

    # Folder, name on the Hugging Face hub (org/name) or another address (docs/addresses.md) with
    # config.json and safetensors; "": random weights.
    path: ModelPath = ""
    # Folder, name or address; "": `path`, or the built-in character tokenizer.
    tokenizer: ModelPath = ""
    # Texts that are one token each in the built-in tokenizer: what a tiny model need not spell.
    words: tuple[Name, ...] = ()
    chat_template: File = ""  # Jinja template file; "": the template of the tokenizer
    # Special tokens that messages spell (`<|im_end|>` in a user's text): ordinary text, or tokens.
    special_tokens_in_messages: Literal["text", "tokens"] = "text"
    # Shape of a random model; not used with `path`.
    # Every fourth layer of qwen3_next and qwen3_5 attends; the others are gated delta nets, with
    # heads of the same numbers and size.
    family: Literal[
        "llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "qwen2_5_vl", "qwen3_vl",
        "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    ] = "qwen2"  # fmt: skip
    hidden_size: Width = 64
    num_layers: Annotated[int, Range("[1, 1024]")] = 2
    num_heads: Annotated[int, Range("[1, 65536]")] = 4
    num_kv_heads: Annotated[int, Range("[1, 65536]")] = 2
    head_size: Annotated[int, Range("[2, 65536]")] = 16
    mlp_size: Width = 256  # of an expert's MLP too
    # Of families with experts: in each layer, and visited by each token.
    num_experts: Annotated[int, Range("[1, 32767]")] = 4
    experts_per_token: Annotated[int, Range("[1, 32767]")] = 2
    vision: VisionConfig = VisionConfig()  # of families qwen2_5_vl and qwen3_vl
    rope_theta: Annotated[float, Range("[1, 1e+12]")] = 10_000.0
    tie_embeddings: bool = True
    # Dtypes and memory.
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # Frozen kernels under the adapters of `lora`, in training and sampling: NF4 with double
    # quantization as bitsandbytes (4.13 bits a weight), or int8 with one scale per output.
    # Embedding, head, norms and biases keep `param_dtype`.
    quantization: Literal["none", "int8", "nf4"] = "none"
    # Rematerialization: which activations the backward pass recomputes or offloads
    # (docs/performance.md). "auto": the plan takes the least recomputation that fits.
    remat: Literal[
        "auto", "none", "full", "attention", "projections", "dots", "offload_full",
        "offload_attention",
    ] = "auto"  # fmt: skip
    attention: Literal["auto", "xla", "splash", "cudnn"] = "auto"  # kernel for packed rows
    vocab_chunk: Tokens = 512  # tokens whose logits exist at the same time

    def rules(self) -> Problems:
        yield from self._word_rules()
        if self.num_heads % self.num_kv_heads:
            message = f"{self.num_kv_heads} does not divide num_heads={self.num_heads}"
            yield "num_kv_heads", message
        if self.is_hybrid and not self.path and self.num_layers < ATTENTION_INTERVAL:
            message = (
                f"{self.num_layers}, but only every layer {ATTENTION_INTERVAL} of {self.family}"
                f" attends, and one must; use at least {ATTENTION_INTERVAL}"
            )
            yield "num_layers", message
        if self.head_size % 2:
            yield "head_size", f"must be even (rotary pairs), got {self.head_size}"
        if self.experts_per_token > self.num_experts:
            message = f"{self.experts_per_token} exceeds num_experts={self.num_experts}"
            yield "experts_per_token", message
        if self.attention == "cudnn" and self.compute_dtype != "bfloat16":
            yield "attention", "cuDNN attends in 16 bits; set compute_dtype='bfloat16' or 'auto'"

    @property
    def is_hybrid(self) -> bool:
        """Whether a random model has gated delta nets between its attention layers."""
        return self.family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

    @property
    def has_vision(self) -> bool:
        """Whether a random model has a vision encoder."""
        return self.family in ("qwen2_5_vl", "qwen3_vl")

    def _word_rules(self) -> Problems:
        if self.words and (self.path or self.tokenizer):
            yield "words", "only the built-in tokenizer has them; leave them out with a folder"
        for i, word in enumerate(self.words):
            if len(word) < 2 or not (word.isascii() and word.isprintable()):
                message = f"{word!r} must be two printable ASCII characters or more"
                yield f"words[{i}]", message
            elif word in self.words[:i]:
                yield f"words[{i}]", f"{word!r} is there twice"


PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


class LoraConfig(ConfigGroup):
    """Low-rank adapters on a frozen policy (arXiv:2106.09685): W + alpha / rank * A B.

    All weights of a critic are trained.
    """

    rank: Annotated[int, Range("[0, 65536]", "0: off, all weights of the policy are trained")] = 0
    alpha: Annotated[float, Range("(0, 1000000]")] = 16.0
    targets: tuple[Name, ...] = PROJECTIONS  # projections that get adapters
    # Folder or repository of `peft` with the first adapters; "": they change nothing yet.
    path: ModelPath = ""

    @property
    def scale(self) -> float:
        """The factor of the product A B."""
        return self.alpha / self.rank

    def rules(self) -> Problems:
        for name in self.targets:
            if name not in PROJECTIONS:
                yield "targets", f"unknown projection {name!r}; known: {', '.join(PROJECTIONS)}"
        if self.path and not self.rank:
            yield "path", "lora.rank=0 has no adapters; set it to the rank of those in the folder"
        if self.rank and not self.targets:
            yield "targets", "names no projection; nothing would be trained"


class RouterLossConfig(ConfigGroup):
    """Routers of networks with experts: what keeps experts evenly used.

    The coefficients are of losses over the tokens that a job learns from.
    """

    # Of the balance loss of each sequence (arXiv:2412.19437, Sec. 2.1.2).
    balance_coef: Annotated[float, Range("[0, 1000]")] = 0.0
    # Of the mean squared log of the sum of exp(router's logits) (arXiv:2202.08906).
    z_coef: Annotated[float, Range("[0, 1000]")] = 0.0
    # Each update moves the biases that select experts by so much (arXiv:2408.15664).
    bias_rate: Annotated[float, Range("[0, 1000]")] = 0.0


class RouterConfig(RouterLossConfig):
    """Routers in RL, of the policy and of critics: whose routes they follow besides."""

    # "compare" reports how many routes are the engine's; "rollout" follows the engine's in scoring
    # and update (R3), "scoring" those of the policy before the first update of a step (R2).
    replay: Literal["off", "compare", "rollout", "scoring"] = "off"
    # Tokens whose routes are not known: an error, or the router's own choice.
    missing_routes: Literal["error", "own"] = "error"

    @property
    def needs_rollout_routes(self) -> bool:
        """Whether the engine reports the experts of each token."""
        return self.replay in ("compare", "rollout")


class CriticConfig(ConfigGroup):
    """The value network; used by advantages that read `values`, such as `gae`."""

    # Hugging Face folder (one-label classifier or causal LM); "": the weights of the policy.
    path: ModelPath = ""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)


class ReferenceConfig(ConfigGroup):
    """The frozen reference policy of the KL terms, and of direct preference optimization."""

    path: ModelPath = ""  # "": the weights of the policy at the start


class TrainerConfig(ConfigGroup):
    """The number of steps, the microbatches and the optimizer."""

    num_steps: Count = 100
    # A condition on a metric (docs/metrics.md), for example "val-core/SOURCE/mean@1 >= 0.9": the
    # run ends with the first step after which it holds, saved. "": only `num_steps` ends it.
    stop_when: Name = ""
    # Per device, including padding; a hard limit.
    max_tokens_per_microbatch: Annotated[int, Range("[0, 2147483647]", "0: chosen by the plan")] = 0
    shared_prompts: Literal["auto", "off"] = "auto"  # compute the prompt of a group once
    optimizer: OptimizerConfig = OptimizerConfig()
    # Peak learning rate of the policy's vision tower, in the warm start too; the schedule and all
    # else are the optimizer's.
    tower_learning_rate: Annotated[float, Range("[0, 1000]", "0: the tower is frozen")] = 0.0

    def rules(self) -> Problems:
        try:
            stop_condition(self.stop_when)
        except ValueError as error:
            yield "stop_when", str(error)


def network_rules(
    model: ModelConfig, lora: LoraConfig, router: RouterLossConfig, trainer: TrainerConfig
) -> Problems:
    """Yields settings of the trained network that contradict each other, by path in the config."""
    if router.bias_rate and lora.rank:
        message = f"{router.bias_rate} moves weights that lora.rank={lora.rank} freezes"
        yield "router.bias_rate", f"{message}; set one of them to 0"
    if model.quantization != "none" and not lora.rank:
        message = f"{model.quantization!r} freezes the kernels, and lora.rank=0 has no adapters"
        yield "model.quantization", f"{message} to train; set lora.rank, or use 'none'"
    numbers = model.param_dtype, lora.rank, router.bias_rate
    for name, message in trainer.optimizer.network_rules(*numbers):
        yield f"trainer.optimizer.{name}", message


def quantization_rules(
    model: ModelConfig, rollout_quantization: str, engine: str, warm_start_steps: int
) -> Problems:
    """Yields settings of RL that contradict a quantized base of the policy."""
    if (format := model.quantization) == "none":
        return
    if rollout_quantization != "none":
        message = f"{rollout_quantization!r}, but sampling reads the base of model.quantization="
        yield "rollout.quantization", f"{message}{format!r}; use 'none'"
    if engine != BUILT_IN_ENGINE:
        message = f"{format!r} is sampled by the built-in engine alone, not by rollout.engine="
        yield "model.quantization", f"{message}{engine!r}"
    if warm_start_steps:
        message = f"{warm_start_steps}, but it trains the kernels that model.quantization="
        remedy = "run job 'sft' with adapters before"
        yield "warm_start.num_steps", f"{message}{format!r} freezes; {remedy}"


def critic_rules(model: ModelConfig, router: RouterLossConfig, critic: CriticConfig) -> Problems:
    """As `network_rules`, of the critic, all of whose weights are trained."""
    for name, message in critic.optimizer.network_rules(model.param_dtype, 0, router.bias_rate):
        yield f"critic.optimizer.{name}", message


class RLTrainerConfig(TrainerConfig):
    """Sizes of a step: prompts x samples, split into minibatches (one update each)."""

    prompts_per_step: Annotated[int, Range("[1, 1000000]")] = 8
    # Sequences of one update.
    minibatch_size: Annotated[int, Range("[0, 2147483647]", "0: the whole step")] = 0
    epochs: Count = 1
    # "sync": responses are sampled in their step, by its weights; "async": ahead of it
    # (docs/async.md).
    sampling: Literal["sync", "async"] = "sync"
    # Async: most completed steps between the weights of any token and those that learn from it.
    max_staleness: Annotated[int, Range("[0, 1000]")] = 1
    # Async: what becomes of responses in flight when new weights come. "recompute" and "keep": they
    # go on by the new weights, with keys and values that these compute anew, or with the old ones.
    # "drain": the weights that began them finish them before others begin.
    new_weights: Literal["recompute", "keep", "drain"] = "recompute"
    # Async: which samples met which weights in which step; "record" writes it to
    # WORKDIR/schedule.jsonl, "replay" repeats that of the file `schedule_file`.
    schedule: Literal["free", "record", "replay"] = "free"
    schedule_file: File = ""
    # Layouts that the run changes to, without a restart: "STEP KEY=VALUE ...", for example
    # "20 mesh.fsdp=1 mesh.tensor=4": from step 20 on. Keys are those of mesh sizes, mesh.rollout
    # and placement.choice; what one does not name is as in the config.
    layouts: tuple[str, ...] = ()

    @property
    def is_free_async(self) -> bool:
        """Whether sampling is asynchronous without a replayed schedule."""
        return self.sampling == "async" and self.schedule == "free"

    def rules(self) -> Problems:
        yield from super().rules()
        if self.schedule == "replay" and not self.schedule_file:
            yield "schedule_file", "required to replay: the schedule.jsonl of a recorded run"
        if self.schedule_file and self.schedule != "replay":
            yield "schedule_file", f"schedule={self.schedule!r} reads none; set it to 'replay'"
        for i, text in enumerate(self.layouts):
            step, *parts = text.split() or [""]
            if not step.isdecimal() or int(step) < 2 or not parts:
                message = f"{text!r} is not 'STEP KEY=VALUE ...' with a step from 2 on"
                yield f"layouts[{i}]", message
        if self.schedule != "free" and self.sampling == "sync":
            yield "schedule", "sampling='sync' has nothing to record; set sampling='async'"

    def minibatch_rules(self, size: int, samples: int) -> Problems:
        """Yields a size of minibatches that does not divide a step of `samples` per prompt."""
        sequences = self.prompts_per_step * samples
        if not 0 < sequences <= INT32_MAX or size <= 0 or not sequences % size:
            return
        small = [n for n in range(1, math.isqrt(sequences) + 1) if sequences % n == 0]
        divisors = sorted({*small, *(sequences // n for n in small)})
        near = sorted(sorted(divisors, key=lambda n: abs(n - size))[:2])
        yield (
            "trainer.minibatch_size",
            f"{size} does not divide the {sequences} sequences of a step"
            f" ({self.prompts_per_step} prompts x {samples} samples);"
            f" use {' or '.join(map(str, near))}",
        )


class SupervisedTrainerConfig(TrainerConfig):
    """Sizes of supervised training: a step is one batch and one update."""

    batch_size: Annotated[int, Range("[1, 1000000]")] = 64  # sequences, or pairs of them
    max_sequence_tokens: Tokens = 2048  # prompt and answer; a longer row is an error
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)


class StageConfig(ConfigGroup):
    """A supervised job before RL: warm start of the policy, or training of reward models."""

    num_steps: Annotated[int, Range("[0, 2147483647]", "0: no such stage")] = 0
    batch_size: Annotated[int, Range("[1, 1000000]")] = 64
    save_every: Every = 200  # steps between checkpoints of the stage
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)
