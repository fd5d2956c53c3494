"""What turns and tools cost beside the tokens that are sampled anyway.

    python benchmarks/agents.py --episodes=64 --turns=8 --turn_tokens=128

Random weights, and turns of exactly so many tokens. All programs are compiled before anything is
timed. It prints one JSON object:

    tools       wall clock of all episodes over that of one, each with `--calls` calls that take
                `--tool_s` each, in processes of their own. Goal: at most 1.5. `compiled`: programs
                compiled while it was timed. Goal: 0.
    prefilled   tokens read over those that are new: prompts, and what follows turns. Goal: 1.1.
    turns       wall clock of all turns, reading and host included, over the seconds of decoding one
                turn of as many sampled tokens; `cpu_ratio` is that of the processor's seconds.
                Goal: at most 1.3.

Ratios are of runs in turns in this process, medians of `--repeats`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxrl_llm.agents.env_manager import EnvManager
from jaxrl_llm.config import MeshConfig
from jaxrl_llm.config.agent import AgentConfig, EnvironmentConfig
from jaxrl_llm.data.tokenizer import character_tokenizer, render_prompts
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import EngineStatistics, SamplingParams
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import EpisodeLog, Prompt, PromptBatch, PromptImage, Weights

TOKENIZER = character_tokenizer()
_MARKS = frozenset(TOKENIZER.all_special_ids)


class Sleeper:
    """An environment that takes its time and answers a few words."""

    def start(self, row):
        self.seconds, self.left, self.words = row["seconds"], row["calls"], row["words"]

    def step(self, message):
        time.sleep(self.seconds)
        self.left -= 1
        return self.words if self.left >= 0 else None


class Following(NamedTuple):
    """What follows a turn at once."""

    tokens: tuple[int, ...]
    rewrites: bool = False
    images: tuple[PromptImage, ...] = ()


class AtOnce:
    """A world that answers every turn but the last with the same tokens, in no time."""

    def __init__(self, tokens: tuple[int, ...], num_turns: int):
        self._following, self._num_turns = Following(tokens), num_turns
        self._heard: dict[int, int] = {}
        self._waiting: list[int] = []

    def begin(self, prompts: PromptBatch, num_samples: int) -> PromptBatch:
        self._heard = dict.fromkeys(range(len(prompts.prompts) * num_samples), 0)
        return prompts

    def submit_turn(self, number: int, tokens: list[int], stopped: bool) -> bool:
        self._heard[number] += 1
        is_answered = self._heard[number] < self._num_turns
        self._waiting += [number] * is_answered
        return is_answered

    def collect_replies(self, wait: bool) -> list[tuple[int, Following]]:
        found, self._waiting = self._waiting, []
        return [(number, self._following) for number in found]

    def end(self, number: int) -> None:
        raise AssertionError("no room for a turn")

    def finish(self) -> list[EpisodeLog]:
        return [EpisodeLog() for _ in self._heard]


class Unhurried(EnvManager):
    """The world of a run, in which a turn that its limit has ended counts as one that is done.

    The template's marks, which random weights sample too, it does not hear.
    """

    def submit_turn(self, number: int, tokens: list[int], stopped: bool) -> bool:
        said = [token for token in tokens if token not in _MARKS]
        return super().submit_turn(number, said, True)


class Played(NamedTuple):
    """What it took to play all episodes."""

    wall_s: float
    cpu_s: float  # of this process; other load disturbs it less
    done: EngineStatistics
    num_sampled: int


class Bench:
    """An engine and prompts."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        heads = args.hidden // 32
        shape = Architecture(
            family="qwen2",
            vocab_size=len(TOKENIZER),
            hidden_size=args.hidden,
            num_layers=args.layers,
            num_heads=heads,
            num_kv_heads=max(1, heads // 2),
            head_size=32,
            mlp_size=3 * args.hidden,
            qkv_bias=True,
        )
        mesh = mesh_lib.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
        network = Network(shape)
        decoding = network.for_decoding(mesh)
        mover = policy_sampler.resharder(network, decoding, mesh, "tensor")
        self.words = "It is so. " * (args.answer_tokens // 10)
        prompt = [{"role": "user", "content": "What is 12 times 34? " * (args.prompt_tokens // 21)}]
        (tokens,), (text,) = render_prompts(TOKENIZER, [prompt])
        self.messages, self.tokens, self.text = tuple(prompt), tokens, text
        sampled = args.turns * args.turn_tokens
        self.added = len(TOKENIZER(self.words)["input_ids"]) + 4  # and the marks of the template
        room = len(tokens) + sampled + args.turns * (self.added + 8)
        self.engine = Engine(
            decoding, mesh, num_slots=args.episodes, max_tokens=room, chunk_steps=args.chunk_steps
        )
        with jax.set_mesh(mesh):
            params = mover.reshard(mover.zeros(), jax.jit(network.init)(jax.random.key(0)))
        self.weights = Weights(params, 0)

    def prompts(self, count: int, seconds: float, calls: int) -> PromptBatch:
        row: dict[str, Any] = {"seconds": seconds, "calls": calls, "words": self.words}
        made = [
            Prompt(self.tokens, self.text, "bench", None, row, i, self.messages, {})
            for i in range(count)
        ]
        return PromptBatch(tuple(made), len(self.tokens))

    def play(
        self, world: episodes.EpisodeEnvironment, prompts: PromptBatch, limit: int, turn: int
    ) -> "Played":
        # Beside the model's own there is no end: a turn has exactly its tokens.
        samples = [SamplingParams(limit)]
        began = time.perf_counter(), time.process_time()
        rollouts, done = episodes.rollout(
            self.engine, self.weights, TOKENIZER, prompts, samples, jax.random.key(0), world, turn
        )
        wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        return Played(wall, cpu, done, int(rollouts.response_mask.sum()))


def tools(bench: Bench, config: AgentConfig) -> dict[str, float]:
    """Returns the wall clock of all episodes and of one, and programs compiled meanwhile."""
    args, found = bench.args, {}
    limit = (args.calls + 1) * (args.turn_tokens + bench.added)
    with Unhurried(config, TOKENIZER) as world:
        for seconds, repeats in ((0.0, 1), (args.tool_s, args.repeats)):  # the first one is a trial
            before, found = bench.engine.num_compilations(), {"all_s": [], "one_s": []}
            for name, count in (("one_s", 1), ("all_s", args.episodes)) * repeats:
                prompts = bench.prompts(count, seconds, args.calls)
                played = bench.play(world, prompts, limit, args.turn_tokens)
                assert played.num_sampled == count * (args.calls + 1) * args.turn_tokens
                found[name].append(played.wall_s)
    medians: Any = {name: statistics.median(values) for name, values in found.items()}
    compiled = bench.engine.num_compilations() - before
    return {**medians, "ratio": medians["all_s"] / medians["one_s"], "compiled": compiled}


def turns(bench: Bench) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the cost of many turns beside one, and the tokens that were read beside new ones."""
    args = bench.args
    sampled, added = args.turns * args.turn_tokens, tuple(range(10, 10 + bench.added))
    prompts = bench.prompts(args.episodes, 0.0, 0)
    limit = sampled + (args.turns - 1) * len(added)
    kinds = {"one": (1, sampled, 0), "many": (args.turns, limit, args.turn_tokens)}
    found: dict[str, list[Played]] = {name: [] for name in kinds}
    for _ in range(args.repeats + 1):
        for name, (count, most, turn) in kinds.items():
            played = bench.play(AtOnce(added, count), prompts, most, turn)
            assert played.num_sampled == args.episodes * sampled
            found[name].append(played)
    cost: Any = {}
    for name, runs in found.items():
        runs = runs[1:]  # the first one is a trial
        cost[name] = {
            "wall_s": statistics.median(run.wall_s for run in runs),
            "cpu_s": statistics.median(run.cpu_s for run in runs),
            "decode_s": statistics.median(run.done.decode_s for run in runs),
            "prefill_s": statistics.median(run.done.prefill_s for run in runs),
            "decode_steps": runs[0].done.decode_steps,
        }
    cost["ratio"] = cost["many"]["wall_s"] / cost["one"]["decode_s"]
    cost["cpu_ratio"] = cost["many"]["cpu_s"] / cost["one"]["cpu_s"]
    new = args.episodes * (len(bench.tokens) + (args.turns - 1) * len(added))
    read = found["many"][0].done.prefill_tokens
    return cost, {"read": read, "new": new, "ratio": read / new}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("episodes", 64),
        ("turns", 8),
        ("turn_tokens", 128),
        ("answer_tokens", 20),
        ("prompt_tokens", 42),
        ("calls", 3),
        ("hidden", 128),
        ("layers", 2),
        ("chunk_steps", 16),
        ("repeats", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tool_s", type=float, default=1.0)
    return parser.parse_args(given)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what was measured."""
    bench = Bench(args)
    for make in bench.engine.programs_to_compile(bench.weights.params, [False], True).values():
        make()
    environment = EnvironmentConfig(environment=f"{__file__}:Sleeper")
    config = AgentConfig(
        environments={"sleeper": environment}, max_turns=args.calls + 1, timeout_s=600.0
    )
    cost, prefilled = turns(bench)
    return {"tools": tools(bench, config), "prefilled": prefilled, "turns": cost}


if __name__ == "__main__":
    print(json.dumps(main(arguments()), indent=1))
