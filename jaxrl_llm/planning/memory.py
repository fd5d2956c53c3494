"""How many bytes each program of a run needs on a device: an estimate in closed form.

The arguments of a program are counted exactly (`setting.py`). What it makes and drops (gradients,
activations, logits) is estimated for each of its phases: the largest counts. `_COMPILERS` has the
differences between compilers; `docs/memory.md` compares plans with their reports.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config.placement import ROLES
from jaxrl_llm.config.samples import PIECE_TOKENS
from jaxrl_llm.models import attention, experts, heads
from jaxrl_llm.models.shape import Layer
from jaxrl_llm.planning import towers
from jaxrl_llm.planning.setting import SCORING, Head, Parts, Setting, in_layers, num_params


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """How many copies a compiler keeps of arrays that it could have dropped."""

    # Of the critic while the policy learns: on CPU its old weights; on TPU its summed gradient
    # where both optimizers come last, as in 8B's programs but not in 0.5B's.
    waiting: float
    of_head: float  # of the head's gradient, beside the microbatch's, while the head works
    optimizing: float  # of the policy's gradient, while the optimizer works
    chunks: tuple[float, float]  # of one piece's float32 logits, in scoring and in training
    tables: float  # of one piece's weights while it is gathered
    hoisted: float  # of them, once more, if the only piece is gathered before its loop
    layers: float  # of one layer's gathered weights in the backward pass
    laid: float  # of the device's share of the head, cut into pieces
    body: bool  # whether the gradient of the layers is there while the head works
    packing: float  # memory of arrays over their bytes, as there are gaps between them


_COMPILERS: Mapping[str, _Compiler] = {
    "tpu": _Compiler(0.5, 0.0, 1.0, (1.0, 1.0), 1.0, 0.0, 1.0, 1.0, True, 1.0),
    "gpu": _Compiler(0.5, 0.0, 1.0, (1.0, 1.0), 1.0, 0.0, 1.0, 0.0, True, 1.0),
    "cpu": _Compiler(1.0, 1.0, 2.75, (3.0, 2.0), 2.0, 1.0, 2.4, 1.0, True, 1.15),
    # One device gathers nothing.
    "one cpu": _Compiler(1.0, 1.0, 2.2, (3.0, 2.0), 1.0, 0.0, 3.0, 0.0, False, 1.2),
}


def _compiler(setting: Setting) -> _Compiler:
    alone = (setting.backend, setting.num_devices) == ("cpu", 1)
    return _COMPILERS["one cpu" if alone else setting.backend]


def programs(setting: Setting, roles: Collection[str] = ROLES) -> dict[str, Parts]:
    """Returns the arguments of each program of `learner/lowering.py`, and what it makes."""
    learners = [role for role in ("policy", "critic") if role in roles and setting.has(role)]
    found: dict[str, Parts] = {}
    if "rollout" in roles:
        found |= {"prefill": _prefill(setting), "decode": _decode(setting)}
    if "policy" in roles or ("reference" in roles and needs.of(setting.config.algorithm).reference):
        found["score"] = _score(setting, "lm")
    if "critic" in learners:
        found["score_critic"] = _score(setting, "scalar")
    if "reward" in roles and setting.scorers:
        for name, head in SCORING:
            asked = [scorer.shape for scorer in setting.scorers if scorer.head == head]
            if asked:
                largest = dataclasses.replace(setting, model=max(asked, key=num_params))
                found[name] = _score(largest, head)
                if head == "lm":
                    lessons = setting.lessons(setting.config.sequences_per_step)
                    found[name] += Parts(activations=lessons)
    if learners:
        found["train"] = _train(setting, learners)
    if "policy" in roles:
        found |= _reshard(setting)
    if "policy" in roles and setting.policy.vision:
        found["tower"] = towers.reading(setting)
    return found


def resident(setting: Setting, roles: Collection[str] = ROLES) -> Parts:
    """Returns what is on a device during all of a step: models, optimizers, the rollout copy.

    A run that samples ahead may have that copy twice: the old one serves while the new one is
    copied to a pool of its own, or until it has finished what it began. With the policy, what reads
    images beside the engine: a frozen tower, or a copy of it.
    """
    found = sum((setting.resting(role) for role in roles), Parts())
    finishes = setting.config.trainer.new_weights == "drain"
    if setting.config.max_staleness and "rollout" in roles and (finishes or "policy" not in roles):
        found += setting.resting("rollout")
    if "policy" in roles:
        found += Parts(weights=1.0 * setting.tower * setting.param_item)
    return found


def step(setting: Setting, roles: Collection[str] = ROLES) -> dict[str, Parts]:
    """Returns all that is on a device while each program runs."""
    beside = resident(setting, roles)
    found = {
        name: beside + own - _counted_twice(setting, name, own, roles)
        for name, own in programs(setting, roles).items()
    }
    if {"policy", "rollout"} <= set(roles) and setting.config.trainer.sampling == "sync":
        for name in {"score", "score_critic", "train"} & set(found):  # after `Sampler.release`
            found[name] -= setting.resting("rollout")
    return found


def peak(setting: Setting, roles: Collection[str] = ROLES) -> float:
    return max((parts.total for parts in step(setting, roles).values()), default=0.0)


def _counted_twice(setting: Setting, program: str, own: Parts, roles: Collection[str]) -> Parts:
    """Returns the arguments of a program that `resident` has counted too."""
    if program == "train":
        learners = [role for role in ("policy", "critic") if role in roles]
        return sum((setting.resting(role) for role in learners), Parts())
    if program == "score" and setting.resting("reference").host:
        # Brought back from the host's memory: a copy that `resident` does not count.
        return Parts()
    moved = {} if "rollout" in roles else setting.resharded
    return Parts(weights=own.weights - moved.get(program, 0.0))


@dataclasses.dataclass(frozen=True)
class _MLP:
    """Bytes of what a device makes in the MLP, or in the experts, of one layer."""

    inner: float  # one of the results that `remat` may keep; of experts, those of the shared MLP
    weights: float  # of the whole layer, gathered for use
    experts: float = 0.0  # of these, of experts, at one time
    rows: float = 0.0  # the inputs of all experts' visits
    results: float = 0.0  # one of the inner results of these

    @classmethod
    def of(cls, setting: Setting, kind: Layer, tokens: int, exchanges: bool = True) -> "_MLP":
        shape, item, of = setting.policy, setting.compute_item, setting.policy.experts
        stack = next(name for name, stack in shape.stacks.items() if stack.layer == kind)
        params = setting.computed()[stack]
        if not kind.experts or of is None:
            inner = tokens * setting.split(shape.mlp_size) * item
            return cls(inner, (params.experts + params.rest) * item)
        ways, visits = setting.mesh["expert"], tokens * of.per_token
        whole = 1.0 * params.experts * item
        if ways > 1 and exchanges:
            visits = ways * experts.room_of_round(visits, ways)
        shards, inner = setting.mesh["fsdp"] * setting.mesh["sequence"], setting.split(of.size)
        if ways == 1 and shards > 1 and inner % shards == 0:
            whole /= experts.num_pieces(whole, inner // shards)
        return cls(
            inner=tokens * setting.split(of.shared_size) * item,
            weights=params.rest * item + whole,
            experts=whole,
            rows=visits * shape.hidden_size * item,
            results=visits * inner * item,
        )


class _Work:
    """Bytes of the pieces that a pass over one microbatch is made of, on one device."""

    def __init__(self, setting: Setting, num_sequences: int):
        config, shape, item = setting.config, setting.policy, setting.compute_item
        rows = setting.rows(num_sequences)
        tokens = round(rows.rows * rows.width) // setting.mesh["sequence"]
        query_heads = setting.split(shape.num_heads)
        self.carry = tokens * shape.hidden_size * item  # one layer's input
        self.queries = tokens * query_heads * shape.head_size * item  # one layer's
        self.mixed = tokens * query_heads * shape.value_size * item
        key_heads = setting.split(shape.num_kv_heads)
        self.keys = tokens * key_heads * shape.head_size * item
        self.values = tokens * key_heads * shape.value_size * item
        latent = shape.latent
        # Of latent attention: what queries, and what keys and values come from.
        self.short = tokens * latent.q_rank * item if latent else 0
        self.compressed = tokens * sum(shape.cached) * item if latent else 0
        self.mlps = {kind: _MLP.of(setting, kind, tokens) for kind in set(shape.kinds)}
        # Float32 attention weights of one block of queries; a kernel keeps none.
        block = 1.0 if rows.gathered else min(1.0, attention.QUERY_BLOCK / rows.width)
        scores = tokens * query_heads * rows.keys * 4.0 * block
        self.scores = scores if setting.kernel == "xla" else 0.0
        # Scores that a layer keeps for its backward pass, and keys gathered for them. With several
        # blocks of queries, scores are computed again.
        at_once = rows.keys <= attention.QUERY_BLOCK
        self.kept = (self.scores + rows.gathered * (self.keys + self.values)) * at_once

        vocab = setting.split(shape.vocab_size)  # rows of the head that are computed with
        here = setting.held("lm")["embed"] // shape.hidden_size  # that rest here
        scored = round(rows.rows * rows.scored) if setting.mesh["sequence"] == 1 else tokens
        pieces = heads.num_pieces(here, vocab // here, scored, config.model.vocab_chunk)
        self.alone = pieces == 1  # whether the head is one piece
        self.share = here * shape.hidden_size * item  # the device's share of the head
        # The embedding, split by features for its look-up.
        moved = vocab > here or config.model.param_dtype != config.model.compute_dtype
        self.slices = self.share if moved else 0.0
        self.table = vocab // pieces * shape.hidden_size * item  # one piece of the head, gathered
        self.chunk = scored * (vocab // pieces) * 4.0  # its float32 logits
        # Beside a piece, while it is gathered.
        self.arriving = 0.0 if self.alone else (_compiler(setting).tables - 1) * self.table

    def pieces(self, compiler: _Compiler, passes: int) -> float:
        # A single piece may be gathered before its loop.
        return compiler.hoisted * passes * self.table if self.alone else compiler.laid * self.share


def _train(setting: Setting, roles: Sequence[str]) -> Parts:
    """Returns what one optimizer update needs: of the policy, its critics, or all of them."""
    compiler, work = _compiler(setting), _Work(setting, setting.config.minibatch_size)
    arguments = sum((setting.given(role) for role in roles), Parts())
    of_critic = setting.num_learned("scalar")
    # Policy and critics learn one after the other; the larger of the two counts.
    learned = max({"policy": setting.num_learned("lm"), "critic": of_critic}[r] for r in roles)
    # Float32 sums over microbatches, if there are several, and one's gradient in `compute_dtype`.
    narrow = 1.0 * learned * setting.compute_item
    several = setting.stages > 1 or setting.rows(setting.config.minibatch_size).count > 1
    if setting.stages > 1:  # of the layers of one round, and their weights if they are cast
        held = setting.held("lm")
        of_layers = 1.0 if setting.adapts("lm") else in_layers(held) / held.total()
        copies = 1 + (setting.param_item > setting.compute_item)
        narrow *= copies * of_layers / setting.policy.rounds
    summed = narrow + 4.0 * learned * several
    both = len(roles) > 1
    waiting = 4.0 * of_critic * compiler.waiting if both else 0.0
    saved, offloaded = _saved(setting, work)
    beside = Parts(activations=saved, temporary=waiting + work.slices * (1 + both))
    # Beside the logits and the piece of the head: their gradients, whichever is larger.
    more = max((compiler.chunks[1] - 1) * work.chunk, work.arriving)
    of_head = 0.0 if setting.adapts("lm") else compiler.of_head * work.share
    at_head = beside + Parts(
        gradients=(summed if compiler.body else summed - narrow) + of_head,
        logits=work.chunk,
        temporary=work.table + more + work.pieces(compiler, passes=2),
    )
    attended = 4 * work.scores + 2 * (work.queries + work.keys + work.values)
    layers = [
        beside
        + Parts(
            gradients=summed,
            activations=attended + 4 * mlp.inner + 6 * mlp.rows + 4 * mlp.results,
            temporary=compiler.layers * mlp.weights + 2 * mlp.experts,
        )
        for mlp in work.mlps.values()
    ]
    at_end = Parts(
        gradients=compiler.optimizing * (4.0 * learned if several else narrow), temporary=waiting
    )
    phases = [at_head] * ("policy" in roles) + [*layers, at_end]
    if "policy" in roles and setting.learns_tower():
        phases.append(towers.learning(setting) + Parts(gradients=summed, temporary=waiting))
    busiest = max(phases, key=lambda parts: parts.total)
    # A step's sequences as the update reads them: a whole copy on every device.
    config, width = setting.config, setting.config.max_sequence_tokens
    batch = 1.0 * config.sequences_per_step * width * (4 + 2 * 1 + 9 * 4)
    batch += config.minibatch_size * width * 2 * 4
    if "policy" in roles:
        batch += setting.lessons(config.minibatch_size) + towers.vectors(setting)
        batch += towers.shown(setting, config.minibatch_size) + towers.summed(setting)
    made = Parts(activations=batch, host=offloaded)
    return arguments + busiest * compiler.packing + made


def _saved(setting: Setting, work: _Work) -> tuple[float, float]:
    """Returns what the forward pass keeps for the backward pass, on the device and on the host."""
    remat, lora = setting.config.model.remat, setting.config.lora
    results = {
        "q": work.queries + work.short,
        "k": work.compressed or work.keys,
        "v": work.keys + work.values if work.compressed else work.values,
        "o": work.carry,
    }
    around = work.queries + work.keys + work.values + work.mixed

    def of_layer(mlp: _MLP) -> float:
        made = results | {"gate": mlp.inner, "up": mlp.inner}
        # Matmuls of adapters have results of their own.
        adapted = sum(made.get(n, 0.0) for n in lora.targets) if lora.rank else 0.0
        # Of each of the two norms its input and its result, in float32 too.
        whole = 7 * work.carry + around + work.queries + 3 * mlp.inner + work.kept
        return {
            "full": work.carry,
            "attention": work.carry + around,
            "projections": work.carry + around + 2 * mlp.inner,
            "dots": work.carry + sum(made.values()) + adapted,
            "none": whole + mlp.experts + 2 * mlp.rows + 3 * mlp.results,
        }[remat.removeprefix("offload_")]

    # Layers on stages, of one item, are not kept at the same time as the others.
    whole = item = 0.0
    for stack in setting.policy.stacks.values():
        layers = len(stack.numbers) * of_layer(work.mlps[stack.layer])
        if stack.stages > 1:
            item += layers / (stack.stages * setting.policy.rounds)
        else:
            whole += layers
    everything, flowing = max(whole, item), 0.0
    if setting.stages > 1:  # inputs of all items, results, and their gradients
        turns = _turns(setting, setting.config.minibatch_size)
        flowing = ((setting.policy.rounds + 2) * setting.stages + 3) * turns * work.carry
    # The memory of a CPU is the host's.
    moved = remat.startswith("offload_") and setting.backend != "cpu"
    return (flowing, everything) if moved else (flowing + everything, 0.0)


def _turns(setting: Setting, num_sequences: int) -> int:
    """Returns the turns of microbatches on stages, see `PackedBatch.on_stages`."""
    return -(-setting.rows(num_sequences).count // setting.stages)


def _score(setting: Setting, head: Head) -> Parts:
    """Returns what a forward pass over a step's sequences needs: of a policy or a critic."""
    compiler, work = _compiler(setting), _Work(setting, setting.config.sequences_per_step)
    phases = [Parts(temporary=work.slices)]
    for mlp in work.mlps.values():
        made = 2 * mlp.inner + 2 * mlp.rows + mlp.results
        layer = work.carry + 2 * work.scores + made
        phases.append(Parts(activations=layer, temporary=mlp.weights))
    between, tables = Parts(temporary=work.slices), 1
    if setting.stages > 1:  # inputs of a round's items, and what enters and leaves the stages
        turns = _turns(setting, setting.config.sequences_per_step)
        between += Parts(activations=(setting.stages + 2) * turns * work.carry)
    if head == "lm":
        phases += [
            Parts(logits=compiler.chunks[0] * work.chunk),
            Parts(logits=work.chunk, temporary=work.table),
            Parts(temporary=work.table + work.arriving),
        ]
        between += Parts(temporary=work.pieces(compiler, passes=1))
        tables = 3  # log-probs, entropies, squares
    busiest = between + max(phases, key=lambda parts: parts.total)
    tokens = setting.config.sequences_per_step * setting.config.max_sequence_tokens
    given = tokens * (4 + 8 + 4 * tables) + towers.vectors(setting)
    if head == "lm":
        given += towers.shown(setting, setting.config.sequences_per_step)
    return busiest + Parts(weights=setting.weights(head), activations=given)


def _decode(setting: Setting) -> Parts:
    shape, rollout = setting.policy, setting.config.rollout
    cache = setting.cache_bytes(setting.num_slots, setting.cache_tokens / setting.num_slots)
    slots = max(1, setting.num_slots // setting.sampling_shards)
    positions = 1 + rollout.speculation.draft_tokens
    # Not yet joined to the cache.
    recent = setting.cache_bytes(setting.num_slots, rollout.chunk_steps * positions)
    vocab = setting.split(shape.vocab_size)
    table = vocab * shape.hidden_size * setting.rollout_item
    temporary = 0.0
    if setting.backend == "tpu" and (latent := shape.latent):
        # What it expands latents with, in the order of two products.
        inner = setting.split(shape.num_heads) * (latent.plain_size + latent.value_size)
        temporary += shape.num_layers * latent.kv_rank * inner * setting.rollout_item
    if setting.config.mesh.rollout == "train" and setting.mesh["fsdp"] > 1:
        layer = max(sum(params) for params in setting.computed().values()) * setting.compute_item
        tables = 3.25 if setting.backend == "tpu" else 2.0
        temporary += tables * table + min(8, shape.num_layers) * layer
    return Parts(
        weights=setting.rollout_weights,
        cache=cache + recent,
        logits=3.0 * slots * positions * vocab * 4,
        temporary=temporary,
    )


def _prefill(setting: Setting) -> Parts:
    config, shape = setting.config, setting.policy
    width = config.data.max_prompt_tokens
    prompts = max(1, min(config.trainer.prompts_per_step, 4096 // width))
    rows = setting.rows_here(prompts)
    block = attention.QUERY_BLOCK if width <= PIECE_TOKENS else PIECE_TOKENS
    scores = rows * setting.split(shape.num_heads) * width * min(width, block) * 4.0
    scores *= setting.kernel != "cudnn"  # splash reads no prompts
    tokens = rows * width
    exchanges = prompts % setting.sampling_shards == 0
    mlps = [_MLP.of(setting, kind, tokens, exchanges) for kind in set(shape.kinds)]
    made = max(3 * mlp.inner + 4 * mlp.rows + 3 * mlp.results for mlp in mlps)
    # On every device those of all prompts, as any slot may want any; on GPUs also before they are
    # end to end.
    cache = setting.cache_bytes(prompts, width) * prompts / rows
    return Parts(
        weights=setting.rollout_weights,
        cache=cache * (1 + (setting.backend == "gpu")),
        activations=2 * scores + made + towers.prefilled(setting, prompts * width),
        logits=rows * setting.split(shape.vocab_size) * 4.0,
    )


def _reshard(setting: Setting) -> dict[str, Parts]:
    held, wanted, item = setting.held("lm"), setting.rollout_held, setting.param_item
    ends, layer = setting.resharded.values()
    held_ends, gathers = held.total() - in_layers(held), wanted["embed"] > held["embed"]
    if setting.backend == "gpu":  # the device's share of what is gathered, cast
        beside_ends = 1.0 * gathers * held_ends * setting.rollout_item
    else:  # tables that are split as in training are copied one by one
        beside_ends = ends if gathers else ends / 2 * _compiler(setting).laid
    beside_layer = layer / 2 if in_layers(wanted) > in_layers(held) else 0.0
    last = held[f"layers.{list(setting.policy.stacks)[-1]}"]
    return {
        "reshard": Parts(held_ends * item + ends, temporary=beside_ends),
        "reshard_layer": Parts(last * item + layer, temporary=beside_layer),
    }
