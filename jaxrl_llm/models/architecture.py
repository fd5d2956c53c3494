"""The architecture of a decoder: sizes, options and layer types; no arrays."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from jaxrl_llm.config import ModelConfig
from jaxrl_llm.config.learner import ATTENTION_INTERVAL

_LONGEST_PATTERN = 12  # in runs of equal layers
_RANDOM_DEEPSTACK = 3  # deepstack layers of a random model, as of Qwen3-VL
_RANDOM_POSITION_SIDE = 16  # of the table of learned positions of a random vision encoder


Mixer = Literal["attention", "gated_delta"]  # how a layer mixes tokens
VisionKind = Literal["qwen2_5", "qwen3"]  # see `models/vision/encoder.py`


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary wavelengths are stretched beyond the original context.

    `factor` 1 changes nothing. "linear" divides all frequencies by the factor;
    "llama3" those of long wavelengths (arXiv:2407.21783, Sec. 3.2); "yarn" those that rotate less
    than `slow_turns` times in the original context (arXiv:2309.00071, Sec. 3.2); "longrope" divides
    each frequency by a factor of its own (arXiv:2402.13753, Sec. 3.2): by one of `long_factors` in
    a network for longer sequences than the original context (`Architecture.for_length`), by one of
    `short_factors` in others.
    """

    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    kind: Literal["llama3", "linear", "yarn", "longrope"] = "llama3"
    fast_turns: float = 32.0  # yarn
    slow_turns: float = 1.0
    whole_dims: bool = True  # yarn: bounds of the ramp are rounded to whole dims
    magnitude: float = 1.0  # yarn, longrope: multiplies cos and sin
    short_factors: tuple[float, ...] = ()  # longrope: one per rotated pair
    long_factors: tuple[float, ...] = ()
    is_long: bool = False  # longrope: `long_factors` are used

    @property
    def changes_frequencies(self) -> bool:
        return self.factor != 1.0 or self.kind == "longrope"


@dataclasses.dataclass(frozen=True)
class LayerType:
    """Attention and MLP type of one layer, where layers of a model differ."""

    window: int = 0  # sliding window in tokens, the query included; 0: full attention
    chunk: int = 0  # chunked attention: positions per chunk; 0: full attention
    rope: Literal["main", "local", "none"] = "main"
    experts: bool = False  # a mixture of experts instead of one MLP
    top_keys: int = 0  # keys that a query attends to, chosen by the `KeyIndexer`; 0: all
    mixer: Mixer = "attention"
    deepstack: int = 0  # which deepstack features of images its output takes, from 1; 0: none


UNIFORM_LAYER = LayerType()  # the layer type of a uniform model


@dataclasses.dataclass(frozen=True)
class LatentAttentionSizes:
    """Multi-head latent attention, MLA (arXiv:2405.04434, Sec. 2.1)."""

    kv_rank: int  # of the KV latent, which is cached together with the rotated part of the keys
    plain_size: int  # dims of a query or key that are not rotated; they come first
    value_size: int
    q_rank: int = 0  # of the query latent; 0: queries are projected from the hidden state


@dataclasses.dataclass(frozen=True)
class KeyIndexer:
    """The lightning indexer of sparse attention, DSA (arXiv:2512.02556, Sec. 2.1)."""

    num_heads: int
    head_size: int
    rope_interleaved: bool = False


@dataclasses.dataclass(frozen=True)
class GatedDeltaSizes:
    """Gated delta net layers (arXiv:2412.06464), see `models/recurrent`."""

    num_key_heads: int  # of queries too
    num_value_heads: int  # a multiple: each key head serves as many value heads
    key_size: int
    value_size: int
    convolution_tokens: int = 4  # width of the causal convolution, its own token included

    @property
    def key_dims(self) -> int:
        """Key dims of all heads."""
        return self.num_key_heads * self.key_size

    @property
    def value_dims(self) -> int:
        """Value dims of all heads."""
        return self.num_value_heads * self.value_size


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts and its router."""

    num: int
    per_token: int
    size: int  # intermediate size of one expert
    shared_size: int = 0  # intermediate size of the shared expert; 0: none
    shared_gate: bool = False  # a learned gate, one number a token, weighs the shared expert
    # The weight of an expert is its score: softmax over all experts, or the sigmoid of its logit.
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True  # the weights of a token's experts sum to 1
    scale: float = 1.0  # factor of the weights, after normalization
    weighs_input: bool = False  # weights multiply an expert's input, not its output
    selection_bias: bool = False  # added to scores to choose, not to weigh (arXiv:2408.15664)
    groups: int = 1  # of experts; a token's experts are of `top_groups` groups
    top_groups: int = 1
    bias: bool = False  # of router and experts
    act: Literal["silu", "clamped"] = "silu"  # "clamped": that of gpt-oss


@dataclasses.dataclass(frozen=True)
class VisionArchitecture:
    """A vision encoder of image patches (arXiv:2502.13923, arXiv:2511.21631).

    Layers attend within windows of an image, some to the whole image. Each square of `merge_size` x
    `merge_size` patches becomes one embedding of the decoder's hidden size, and one more for each
    of `deepstack_layers`.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    full_layers: tuple[int, ...]  # layers that attend to the whole image
    window_size: int = 112  # pixels a side; 0: all layers attend to the whole image
    patch_size: int = 14  # pixels a side
    merge_size: int = 2
    frames: int = 2  # of a patch; an image is repeated as all of them
    image_token: int = 151655  # id of the placeholder token of an image embedding
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    act: Literal["silu"] = "silu"
    kind: VisionKind = "qwen2_5"
    position_side: int = 0  # of the square table of learned positions; 0: none
    # Layers whose output is merged too (DeepStack, arXiv:2406.04334).
    deepstack_layers: tuple[int, ...] = ()

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dims(self) -> int:
        """The input size of a patch: three colours in all frames."""
        return 3 * self.frames * self.patch_size**2

    @property
    def window(self) -> int:
        """Merged patches along a side of a window; 1 without windows, which need no order."""
        if not self.window_size:
            return 1
        return self.window_size // self.patch_size // self.merge_size

    @property
    def window_patches(self) -> int:
        return (self.window * self.merge_size) ** 2


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One decoder-only transformer: layers of attention and a gated MLP or experts."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int  # of queries and keys
    mlp_size: int
    max_positions: int = 131_072
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    norm_eps: float = 1e-6
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: of each head, before rotary embeddings
    wide_qk_norm: bool = False  # OLMo 2: of all heads together, before rotary embeddings
    tie_embeddings: bool = True
    layers: tuple[LayerType, ...] = ()  # one per layer; (): all uniform
    local_rope_theta: float = 10_000.0  # of layers with `rope="local"`, which is not scaled
    rope_size: int = 0  # rotated dims of a head; 0: all, in MLA all but `plain_size`
    rope_interleaved: bool = False  # pairs are (0, 1), (2, 3), ..., not (i, i + size / 2)
    query_scale: float = 0.0  # factor of attention scores; 0: H ** -0.5
    score_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they stay
    logit_cap: float = 0.0
    o_bias: bool = False
    output_gate: bool = False  # attention's output is multiplied by sigmoids of a projection
    sinks: bool = False  # gpt-oss: learned attention sinks, a logit without a key per head
    unit_qk: bool = False  # Llama 4: RMS norm of queries and keys after rotary embeddings
    long_query_scale: float = 0.0  # Llama 4: attention temperature of layers without rope; 0: none
    long_query_from: int = 8192
    act: Literal["silu", "gelu"] = "silu"
    norm_offset: float = 0.0  # Gemma: norms multiply by 1 + scale
    pre_norms: bool = True  # norms of attention and MLP inputs; OLMo 2 has only `post_norms`
    post_norms: bool = False  # norms of attention and MLP outputs, before the residual addition
    scale_embeddings: bool = False  # Gemma: by the square root of the hidden size
    latent: LatentAttentionSizes | None = None
    indexer: KeyIndexer | None = None  # of layers with `top_keys`, only with `latent`
    gated_delta: GatedDeltaSizes | None = None  # of layers with `mixer="gated_delta"`
    experts: Experts | None = None
    # M-RoPE: pairs of a head that rotate with time, row and column of an image, in this order
    # (arXiv:2409.12191, Sec. 2.1); (): positions are one number.
    rope_sections: tuple[int, ...] = ()
    # Pairs of the three parts alternate, as long as there are any, instead of three blocks.
    rope_sections_interleaved: bool = False
    vision: VisionArchitecture | None = None
    # First layers to whose output features of images are added, one of `deepstack_layers` each.
    num_deepstack: int = 0
    # How training stores layers for pipeline parallelism, see `split_over_stages`.
    stages: int = 1
    rounds: int = 1

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        """The type of each layer."""
        kinds = self.layers or (UNIFORM_LAYER,) * self.num_layers
        numbered = (
            dataclasses.replace(kind, deepstack=number)
            for number, kind in enumerate(kinds[: self.num_deepstack], 1)
        )
        return (*numbered, *kinds[self.num_deepstack :])

    @property
    def image_feature_size(self) -> int:
        """Values of an image token: its embedding, then what deepstack layers add."""
        return self.hidden_size * (1 + self.num_deepstack)

    @property
    def layer_groups(self) -> tuple[tuple["LayerStack", ...], ...]:
        """Stacks of layers, grouped by repeated pattern, in layer order."""
        groups = _groups(self.layer_types)
        return groups if self.stages == 1 else split_over_stages(groups, self.stages, self.rounds)

    def with_stages(self, stages: int, rounds: int) -> "Architecture":
        """This architecture with layers stored for `mesh.stage` and `mesh.stage_rounds`."""
        return dataclasses.replace(self, stages=stages, rounds=rounds if stages > 1 else 1)

    def for_length(self, max_tokens: int) -> "Architecture":
        """This architecture in a program whose longest sequence has `max_tokens` tokens.

        Only longrope depends on it, and never goes back to the short factors. All sequences have
        the factors of the longest one, as in vLLM: with factors by sequence, tokens that were
        sampled before a sequence outgrew the original context would be scored with other
        frequencies than they were sampled with.
        """
        scaling = self.rope_scaling
        if scaling.kind != "longrope" or max_tokens <= scaling.original_max_positions:
            return self
        return dataclasses.replace(self, rope_scaling=dataclasses.replace(scaling, is_long=True))

    @property
    def as_published(self) -> "Architecture":
        """This architecture as a model folder describes it: for sequences of any length."""
        if not self.rope_scaling.is_long:
            return self
        return dataclasses.replace(
            self, rope_scaling=dataclasses.replace(self.rope_scaling, is_long=False)
        )

    @property
    def layer_stacks(self) -> dict[str, "LayerStack"]:
        """All stacks by name in the parameter tree."""
        return {stack.name: stack for group in self.layer_groups for stack in group}

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The indices of the MoE layers."""
        return tuple(number for number, kind in enumerate(self.layer_types) if kind.experts)

    @property
    def kv_cache_sizes(self) -> tuple[int, int, int]:
        """Heads, key dims and value dims of a token in the KV cache.

        With MLA there are no values: they are the first `kv_rank` dims of the keys. The last dims
        of the keys are those of the indexer, if there is one.
        """
        if self.latent:
            key_size = self.latent.kv_rank + self.head_size - self.latent.plain_size
            return 1, key_size + (self.indexer.head_size if self.indexer else 0), 0
        return self.num_kv_heads, self.head_size, self.head_size

    @property
    def has_plain_scores(self) -> bool:
        """Whether scores are plain scaled dot products: no cap, sinks, own scale or MLA."""
        return not (self.query_scale or self.score_cap or self.sinks or self.latent)

    @property
    def supports_ring(self) -> bool:
        """Whether ring attention (`sequence_attention`) supports all layers."""
        return self.has_plain_scores and not any(kind.window for kind in self.layer_types)

    @property
    def value_size(self) -> int:
        """Value dims of a head."""
        return self.latent.value_size if self.latent else self.head_size


class LayerStack(NamedTuple):
    """Equal layers whose parameters are stacked: runs of consecutive layers at equal distances.

    With pipeline stages, the layers of a stage are next to each other, in the order of
    `split_over_stages`.
    """

    name: str
    layer: LayerType
    layer_indices: tuple[int, ...]
    run_length: int  # consecutive layers per run
    stages: int = 1  # pipeline stages that the layers are split over


@functools.lru_cache(maxsize=256)
def _groups(kinds: tuple[LayerType, ...]) -> tuple[tuple[LayerStack, ...], ...]:
    """Groups layers into repeated patterns of runs, with the fewest runs to compile.

    One layer of each run of a pattern is compiled, however long the run is and however often the
    pattern repeats. Found by dynamic programming over the runs.
    """
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds)]
    starts = list(itertools.accumulate((length for _, length in runs), initial=0))

    def repeats(start: int, period: int) -> int:
        pattern, count = runs[start : start + period], 1
        while runs[start + count * period :][:period] == pattern:
            count += 1
        return count

    # best[i]: cost, number of groups, and (period, repeats) of the first group from run i on
    best: list[tuple[int, int, tuple[int, int]]] = [(0, 0, (0, 0))] * (len(runs) + 1)
    for i in reversed(range(len(runs))):
        candidates = []
        for period in range(1, min(_LONGEST_PATTERN, len(runs) - i) + 1):
            count = repeats(i, period)
            cost, groups, _ = best[i + period * count]
            candidates.append((cost + period, groups + 1, (period, count)))
        best[i] = min(candidates)

    names = itertools.count()

    def stack(first: int, period: int, count: int) -> LayerStack:
        kind, length = runs[first]
        numbers = (starts[first + i * period] + k for i in range(count) for k in range(length))
        return LayerStack(str(next(names)), kind, tuple(numbers), length)

    def patterns() -> Iterator[tuple[LayerStack, ...]]:
        start = 0
        while start < len(runs):
            period, count = best[start][2]
            yield tuple(stack(start + i, period, count) for i in range(period))
            start += period * count

    return tuple(patterns())


def split_over_stages(
    groups: tuple[tuple[LayerStack, ...], ...], stages: int, rounds: int
) -> tuple[tuple[LayerStack, ...], ...]:
    """Splits the group with the most layers over pipeline stages; other groups stay whole.

    Its patterns run in the order (round, stage, slot) and are stored as (stage, round, slot), so
    that the layers of a stage are contiguous. Patterns that do not fill one more slot in every
    stage and round become a group of their own, which runs after the stages.

    Raises:
      ValueError: If the group has fewer patterns than stages times rounds; see
        `stage_split_problem`.
    """
    patterns = tuple(itertools.chain.from_iterable(map(_pattern_groups, groups)))
    largest = max(patterns, key=lambda group: sum(len(stack.layer_indices) for stack in group))
    num_patterns = len(largest[0].layer_indices) // largest[0].run_length
    slots = num_patterns // (stages * rounds)
    if not slots:
        raise ValueError(f"{num_patterns} patterns of layers, {stages} stages x {rounds} rounds")
    stage_order = [
        ((r * stages + s) * slots + slot)
        for s, r, slot in itertools.product(range(stages), range(rounds), range(slots))
    ]

    def select(stack: LayerStack, order: Iterable[int], num_stages: int) -> LayerStack:
        runs = [
            stack.layer_indices[i : i + stack.run_length]
            for i in range(0, len(stack.layer_indices), stack.run_length)
        ]
        return stack._replace(
            layer_indices=tuple(n for i in order for n in runs[i]), stages=num_stages
        )

    result: list[tuple[LayerStack, ...]] = []
    for group in patterns:
        if group is not largest:
            result.append(group)
            continue
        result.append(tuple(select(stack, stage_order, stages) for stack in group))
        if remainder := range(len(stage_order), num_patterns):
            result.append(tuple(select(stack, remainder, 1) for stack in group))
    names = itertools.count()
    return tuple(tuple(s._replace(name=str(next(names))) for s in group) for group in result)


def _pattern_groups(group: tuple[LayerStack, ...]) -> Iterator[tuple[LayerStack, ...]]:
    """Yields the groups of repeated patterns; a run of equal layers is a pattern of one layer."""
    if len(group) > 1 and len(group[0].layer_indices) > group[0].run_length:
        yield group
    else:
        yield from ((stack._replace(run_length=1),) for stack in group)


def stage_split_problem(shape: Architecture, stages: int, rounds: int) -> str:
    """The reason why layers cannot be split over these stages and rounds; "" if they can."""
    groups = itertools.chain.from_iterable(map(_pattern_groups, _groups(shape.layer_types)))
    largest = max(groups, key=lambda group: sum(len(stack.layer_indices) for stack in group))
    num_patterns = len(largest[0].layer_indices) // largest[0].run_length
    if stages == 1 or stages * rounds <= num_patterns:
        return ""
    if stages <= num_patterns:
        remedy = f"mesh.stage_rounds={num_patterns // stages}"
    else:
        remedy = f"mesh.stage={num_patterns}, mesh.stage_rounds=1"
    unit = "layers" if len(largest) == 1 else f"repeated patterns of {len(largest)} kinds of layers"
    return (
        f"{stages} stages x {rounds} rounds need as many layers that are alike, and the model has"
        f" {num_patterns} {unit}; use {remedy}"
    )


def architecture_from_config(config: ModelConfig, vocab_size: int) -> Architecture:
    """The architecture of a randomly initialized model, from a config without a folder."""
    experts = None
    if config.family in ("mixtral", "qwen3_moe"):
        experts = Experts(config.num_experts, config.experts_per_token, config.mlp_size)
    if config.is_hybrid:
        return _hybrid_from_config(config, vocab_size)
    vision: VisionArchitecture | None = None
    sections: tuple[int, ...] = ()
    if config.has_vision:
        vision = _vision_from_config(config)
        num_pairs = config.head_size // 2
        spatial = num_pairs * 3 // 8
        sections = (num_pairs - 2 * spatial, spatial, spatial)
    return Architecture(
        family=config.family,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        mlp_size=config.mlp_size,
        rope_theta=config.rope_theta,
        qkv_bias=config.family in ("qwen2", "qwen2_5_vl"),
        qk_norm=config.family in ("qwen3", "qwen3_moe", "qwen3_vl"),
        tie_embeddings=config.tie_embeddings,
        layers=(LayerType(experts=True),) * config.num_layers if experts else (),
        experts=experts,
        rope_sections=sections,
        rope_sections_interleaved=config.family == "qwen3_vl",
        vision=vision,
        num_deepstack=len(vision.deepstack_layers) if vision else 0,
    )


def _vision_from_config(config: ModelConfig) -> VisionArchitecture:
    """The vision encoder of a random model."""
    tower = config.vision
    own_fields: dict[str, Any] = {
        "full_layers": tuple(range(1, tower.num_layers, 2)),
        "window_size": tower.window_size,
    }
    if config.family == "qwen3_vl":
        num_deepstack = min(_RANDOM_DEEPSTACK, tower.num_layers, config.num_layers)
        own_fields = {
            "kind": "qwen3",
            "full_layers": tuple(range(tower.num_layers)),
            "window_size": 0,
            "position_side": _RANDOM_POSITION_SIDE,
            "deepstack_layers": tuple(range(num_deepstack)),
        }
    return VisionArchitecture(
        num_layers=tower.num_layers,
        hidden_size=tower.hidden_size,
        num_heads=tower.num_heads,
        mlp_size=tower.mlp_size,
        patch_size=tower.patch_size,
        **own_fields,
    )


def _hybrid_from_config(config: ModelConfig, vocab_size: int) -> Architecture:
    """A random model of the families whose layers are gated delta nets and attention in turn."""
    experts = None
    if config.family != "qwen3_5_text":
        experts = Experts(
            config.num_experts,
            config.experts_per_token,
            config.mlp_size,
            shared_size=config.mlp_size,
            shared_gate=True,
        )
    mixes = LayerType(mixer="gated_delta", rope="none", experts=experts is not None)
    attends = LayerType(experts=experts is not None)
    return Architecture(
        family=config.family,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        mlp_size=0 if config.family == "qwen3_5_moe_text" else config.mlp_size,
        rope_theta=config.rope_theta,
        rope_size=max(2, config.head_size // 8 * 2),
        qk_norm=True,
        output_gate=True,
        norm_offset=1.0,
        tie_embeddings=config.tie_embeddings,
        layers=tuple(
            mixes if (i + 1) % ATTENTION_INTERVAL else attends for i in range(config.num_layers)
        ),
        gated_delta=GatedDeltaSizes(
            num_key_heads=config.num_kv_heads,
            num_value_heads=config.num_heads,
            key_size=config.head_size,
            value_size=config.head_size,
        ),
        experts=experts,
    )
