"""The numbers that make one decoder differ from another; no arrays here."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from jaxrl_llm.config import ModelConfig

_LONGEST_PATTERN = 12  # runs of equal layers


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary wavelengths are stretched beyond the original context.

    `factor` 1 leaves every wavelength as it is. "linear" divides all frequencies by the factor;
    "llama3" those of long wavelengths (arXiv:2407.21783, Sec. 3.2); "yarn" those that turn less
    than `slow_turns` times in the original context (arXiv:2309.00071, Sec. 3.2).
    """

    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    kind: Literal["llama3", "linear", "yarn"] = "llama3"
    fast_turns: float = 32.0  # yarn
    slow_turns: float = 1.0
    whole_dims: bool = True  # yarn: the blend begins and ends at whole dims
    magnitude: float = 1.0  # yarn: of the rotated vectors


@dataclasses.dataclass(frozen=True)
class Layer:
    """What one layer may have that others of its network have not."""

    window: int = 0  # tokens back from a query, itself included, that it sees; 0: all
    chunk: int = 0  # positions that see one another, from a multiple of it on; 0: all
    rope: Literal["main", "local", "none"] = "main"
    experts: bool = False  # instead of one MLP


EVERYWHERE = Layer()  # a layer of a network whose layers are all the same


@dataclasses.dataclass(frozen=True)
class Latent:
    """Latent attention (arXiv:2405.04434, Sec. 2.1): keys and values from one short vector."""

    kv_rank: int  # of that vector, which alone is cached, with the rotated part of the keys
    plain_size: int  # dims of a query or key that are not rotated; they come first
    value_size: int
    q_rank: int = 0  # of the vector that queries come from; 0: from the hidden state


@dataclasses.dataclass(frozen=True)
class Experts:
    """MLPs of which each token visits a few, and the router that chooses them."""

    num: int
    per_token: int
    size: int  # of one expert's inner vector
    shared_size: int = 0  # of the MLP that all tokens visit as well; 0: none
    # The weight of an expert is its score: softmax over all experts, or the sigmoid of its logit.
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True  # the weights of a token's experts sum to 1
    scale: float = 1.0  # of the weights, afterwards
    weighs_input: bool = False  # the weight scales what an expert reads, not what it returns
    selection_bias: bool = False  # added to scores to choose, not to weigh (arXiv:2408.15664)
    groups: int = 1  # of experts; a token's experts are of `top_groups` groups
    top_groups: int = 1
    bias: bool = False  # of router and experts
    act: Literal["silu", "clamped"] = "silu"  # "clamped": that of gpt-oss


@dataclasses.dataclass(frozen=True)
class Vision:
    """The tower that turns patches of images into vectors in place of tokens (arXiv:2502.13923).

    Layers attend within windows of an image, some to all of it. A square of `merge_size` patches
    a side becomes one vector, as wide as the decoder's hidden state.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    full_layers: tuple[int, ...]  # that see the whole image
    window_size: int = 112  # pixels a side
    patch_size: int = 14  # pixels a side
    merge_size: int = 2
    frames: int = 2  # of a patch; an image stands still
    image_token: int = 151655  # of the vocabulary: where a vector of an image stands
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    act: Literal["silu"] = "silu"

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dims(self) -> int:
        """Numbers of a patch: of three colours in all frames."""
        return 3 * self.frames * self.patch_size**2

    @property
    def window(self) -> int:
        """Vectors along a side of a window."""
        return self.window_size // self.patch_size // self.merge_size

    @property
    def window_patches(self) -> int:
        return (self.window * self.merge_size) ** 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """One decoder-only transformer: pre-norm layers of attention and a gated MLP or experts."""

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
    qk_norm: bool = False  # Qwen3: of each head, before the rotation
    tie_embeddings: bool = True
    layers: tuple[Layer, ...] = ()  # one for each layer; (): all plain
    local_rope_theta: float = 10_000.0  # of layers with `rope="local"`, which is not scaled
    rope_size: int = 0  # dims of a head that are rotated; 0: all, of latents those not plain
    rope_interleaved: bool = False  # pairs are (0, 1), (2, 3), ..., not (i, i + size / 2)
    query_scale: float = 0.0  # scores are products of queries and keys times it; 0: H ** -0.5
    score_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they stay
    logit_cap: float = 0.0
    o_bias: bool = False
    sinks: bool = False  # gpt-oss: a score of no key, learned for each head
    unit_qk: bool = False  # Llama 4: rotated queries and keys of mean square 1
    long_query_scale: float = 0.0  # Llama 4: of layers without rope, by position; 0: none
    long_query_from: int = 8192
    act: Literal["silu", "gelu"] = "silu"
    norm_offset: float = 0.0  # Gemma: norms multiply with 1 + scale
    post_norms: bool = False  # of what attention and MLP return, before it is added
    scale_embeddings: bool = False  # Gemma: by the square root of the hidden size
    latent: Latent | None = None
    experts: Experts | None = None
    # Positions have three parts: pairs of a head that turn with time, row and column of an image,
    # in this order (arXiv:2409.12191, Sec. 2.1); (): positions are numbers.
    rope_sections: tuple[int, ...] = ()
    vision: Vision | None = None
    # How training stores layers, see `divided`: stages, and times that a token goes around them.
    stages: int = 1
    rounds: int = 1

    @property
    def kinds(self) -> tuple[Layer, ...]:
        """What each layer is."""
        return self.layers or (EVERYWHERE,) * self.num_layers

    @property
    def groups(self) -> tuple[tuple["Stack", ...], ...]:
        """The stacks of layers by repeated pattern, in order of the layers."""
        groups = _groups(self.kinds)
        return groups if self.stages == 1 else divided(groups, self.stages, self.rounds)

    def on_stages(self, stages: int, rounds: int) -> "Shape":
        """Returns the shape as a run with such `mesh.stage` and `mesh.stage_rounds` stores it."""
        return dataclasses.replace(self, stages=stages, rounds=rounds if stages > 1 else 1)

    @property
    def stacks(self) -> dict[str, "Stack"]:
        """All stacks by their names in a parameter tree."""
        return {stack.name: stack for group in self.groups for stack in group}

    @property
    def with_experts(self) -> tuple[int, ...]:
        """The numbers of the layers with experts."""
        return tuple(number for number, kind in enumerate(self.kinds) if kind.experts)

    @property
    def cached(self) -> tuple[int, int, int]:
        """Heads, and dims of keys and of values, that are kept of a token; latents have no values.

        Latent attention takes the first `kv_rank` dims of keys for values.
        """
        if self.latent:
            return 1, self.latent.kv_rank + self.head_size - self.latent.plain_size, 0
        return self.num_kv_heads, self.head_size, self.head_size

    @property
    def has_plain_scores(self) -> bool:
        """Whether scores are products of queries and keys, divided by a root of their size."""
        return not (self.query_scale or self.score_cap or self.sinks or self.latent)

    @property
    def rings(self) -> bool:
        """Whether attention is plain enough for `sequence_attention`'s ring."""
        return self.has_plain_scores and not any(kind.window for kind in self.kinds)

    @property
    def value_size(self) -> int:
        """Dims of a head's values."""
        return self.latent.value_size if self.latent else self.head_size


class Stack(NamedTuple):
    """Equal layers whose parameters are stacked: runs of neighbours, at equal distances.

    Those of one stage are stacked side by side: they come in the order of `divided`.
    """

    name: str
    layer: Layer
    numbers: tuple[int, ...]
    run: int  # layers of one run
    stages: int = 1  # that the layers are split over


@functools.lru_cache(maxsize=256)
def _groups(kinds: tuple[Layer, ...]) -> tuple[tuple[Stack, ...], ...]:
    """Returns the layers as patterns of runs that repeat, with the fewest runs in all patterns.

    One layer of each run of a pattern is compiled, however long the run is and however often the
    pattern repeats.
    """
    runs = [(kind, len(list(equal))) for kind, equal in itertools.groupby(kinds)]
    starts = list(itertools.accumulate((length for _, length in runs), initial=0))

    def repeats(start: int, period: int) -> int:
        pattern, count = runs[start : start + period], 1
        while runs[start + count * period :][:period] == pattern:
            count += 1
        return count

    # best[i]: cost, number of groups, and (period, repeats) of the first group from run i on
    best: list[tuple[int, int, tuple[int, int]]] = [(0, 0, (0, 0))] * (len(runs) + 1)
    for i in reversed(range(len(runs))):
        found = []
        for period in range(1, min(_LONGEST_PATTERN, len(runs) - i) + 1):
            count = repeats(i, period)
            cost, groups, _ = best[i + period * count]
            found.append((cost + period, groups + 1, (period, count)))
        best[i] = min(found)

    names = itertools.count()

    def stack(first: int, period: int, count: int) -> Stack:
        kind, length = runs[first]
        places = (starts[first + i * period] + k for i in range(count) for k in range(length))
        return Stack(str(next(names)), kind, tuple(places), length)

    def patterns() -> Iterator[tuple[Stack, ...]]:
        start = 0
        while start < len(runs):
            period, count = best[start][2]
            yield tuple(stack(start + i, period, count) for i in range(period))
            start += period * count

    return tuple(patterns())


def divided(
    groups: tuple[tuple[Stack, ...], ...], stages: int, rounds: int
) -> tuple[tuple[Stack, ...], ...]:
    """Returns groups of which one, with the most layers, is split over stages.

    Its patterns follow each other as (round, stage, place) and are stored as (stage, round, place).
    Patterns that are too few for one more place at every stage and round stay after it, whole.

    Raises:
      ValueError: If the group has fewer patterns than stages times rounds; `problem` says so.
    """
    units = tuple(itertools.chain.from_iterable(map(_units, groups)))
    most = max(units, key=lambda group: sum(len(stack.numbers) for stack in group))
    number = len(most[0].numbers) // most[0].run
    places = number // (stages * rounds)
    if not places:
        raise ValueError(f"{number} patterns of layers, {stages} stages x {rounds} rounds")
    by_stage = [
        ((r * stages + s) * places + place)
        for s, r, place in itertools.product(range(stages), range(rounds), range(places))
    ]

    def part(stack: Stack, order: Iterable[int], over: int) -> Stack:
        runs = [stack.numbers[i : i + stack.run] for i in range(0, len(stack.numbers), stack.run)]
        return stack._replace(numbers=tuple(n for i in order for n in runs[i]), stages=over)

    found: list[tuple[Stack, ...]] = []
    for group in units:
        if group is not most:
            found.append(group)
            continue
        found.append(tuple(part(stack, by_stage, stages) for stack in group))
        if rest := range(len(by_stage), number):
            found.append(tuple(part(stack, rest, 1) for stack in group))
    names = itertools.count()
    return tuple(tuple(s._replace(name=str(next(names))) for s in group) for group in found)


def _units(group: tuple[Stack, ...]) -> Iterator[tuple[Stack, ...]]:
    """Yields a group as patterns that repeat: equal layers are patterns of one layer each."""
    if len(group) > 1 and len(group[0].numbers) > group[0].run:
        yield group
    else:
        yield from ((stack._replace(run=1),) for stack in group)


def problem(shape: Shape, stages: int, rounds: int) -> str:
    """Returns why the layers cannot be split over so many stages and rounds; "" if they can."""
    units = itertools.chain.from_iterable(map(_units, _groups(shape.kinds)))
    most = max(units, key=lambda group: sum(len(stack.numbers) for stack in group))
    number = len(most[0].numbers) // most[0].run
    if stages == 1 or stages * rounds <= number:
        return ""
    if stages <= number:
        fits = f"mesh.stage_rounds={number // stages}"
    else:
        fits = f"mesh.stage={number}, mesh.stage_rounds=1"
    what = "layers" if len(most) == 1 else f"repeated patterns of {len(most)} kinds of layers"
    return (
        f"{stages} stages x {rounds} rounds need as many layers that are alike, and the model has"
        f" {number} {what}; use {fits}"
    )


def random_model(config: ModelConfig, vocab_size: int) -> Shape:
    """Returns the architecture that a config describes where it names no folder."""
    experts = None
    if config.family in ("mixtral", "qwen3_moe"):
        experts = Experts(config.num_experts, config.experts_per_token, config.mlp_size)
    vision: Vision | None = None
    sections: tuple[int, ...] = ()
    if config.family == "qwen2_5_vl":
        tower = config.vision
        vision = Vision(
            num_layers=tower.num_layers,
            hidden_size=tower.hidden_size,
            num_heads=tower.num_heads,
            mlp_size=tower.mlp_size,
            full_layers=tuple(range(1, tower.num_layers, 2)),
            window_size=tower.window_size,
            patch_size=tower.patch_size,
        )
        rest = config.head_size // 2
        side = rest * 3 // 8
        sections = (rest - 2 * side, side, side)
    return Shape(
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
        qk_norm=config.family in ("qwen3", "qwen3_moe"),
        tie_embeddings=config.tie_embeddings,
        layers=(Layer(experts=True),) * config.num_layers if experts else (),
        experts=experts,
        rope_sections=sections,
        vision=vision,
    )
