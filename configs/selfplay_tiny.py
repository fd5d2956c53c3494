"""Self-play of Nim: a random model of 0.1M parameters, minutes on two CPU cores.

Two players take one, two or three sticks in turn; whoever takes the last one wins. The policy is
both players. Each is a role of the episode with its own dialogue, reward and group, so that a
player is compared with others in its own seat. Moves are constrained to those that are allowed
(`guided_choice`): the untrained policy plays at random, and needs no examples. The run needs no
files. In evaluations the policy plays against random moves, in both seats.
"""

import random

from jaxrl_llm.config.bridge import default_config_dict

ROLES = ("first", "second")
MIN_STICKS, MAX_STICKS, MAX_TAKEN = 7, 15, 3


def ask(base_url, messages, sticks):
    """The number of sticks that the policy at an address takes, and its reply as a message."""
    from jaxrl_llm.agents.harness import ask_policy

    choices = [str(number) for number in range(1, min(MAX_TAKEN, sticks) + 1)]
    message = ask_policy(base_url, messages, guided_choice=choices, max_tokens=4)
    return int(message["content"]), message


def player(base_url):
    """A player that asks the policy at an address, in a dialogue of its own."""
    messages = []

    def move(sticks):
        messages.append({"role": "user", "content": f"{sticks:02d}"})
        taken, message = ask(base_url, messages, sticks)
        messages.append(message)
        return taken

    return move


def winner(players, sticks):
    """Plays a game; returns the index of the player that takes the last stick."""
    turn = 0
    while True:
        sticks -= players[turn](sticks)
        if not sticks:
            return turn
        turn = 1 - turn


def play(row, base_url):
    """An episode: the policy against itself, or in an evaluation against random moves."""
    from jaxrl_llm.agents.harness import role_address

    draw = random.Random(row["seed"])
    sticks = draw.randint(MIN_STICKS, MAX_STICKS)
    if row["split"] == "eval":
        players = [
            player(role_address(base_url, ROLES[0])),
            lambda sticks: draw.randint(1, min(MAX_TAKEN, sticks)),
        ]
        seat = draw.randrange(2)
        wins = winner(players if seat == 0 else players[::-1], sticks) == seat
        return float(wins)
    index = winner([player(role_address(base_url, role)) for role in ROLES], sticks)
    return {"reward": {role: 1.0 if i == index else -1.0 for i, role in enumerate(ROLES)}}


def get_config():
    config = default_config_dict()
    config.model.family = "qwen2"
    config.model.hidden_size = 64
    config.model.num_layers = 2
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_size = 16
    config.model.mlp_size = 192
    config.model.remat = "none"

    config.data.task = "seeds"
    config.data.arithmetic_train_prompts = 4096
    config.data.arithmetic_eval_prompts = 128
    config.data.max_prompt_tokens = 64
    config.rollout.max_response_tokens = 64
    config.rollout.support_tokens = 4
    config.rollout.num_slots = 32
    config.rollout.chunk_steps = 2  # a move is a token, and then its dialogue ends a turn
    config.agent.harness = f"{__file__}:play"
    config.agent.roles = ROLES

    config.algorithm.recipe = "grpo"
    config.algorithm.samples_per_prompt = 8
    config.algorithm.kl_in = "none"
    config.algorithm.entropy_coef = 0.03  # a player that is sure too early meets no other moves
    config.trainer.num_steps = 80
    config.trainer.prompts_per_step = 8
    config.trainer.minibatch_size = 32
    config.trainer.optimizer.learning_rate = 1e-3
    config.trainer.optimizer.warmup_steps = 5
    config.trainer.optimizer.weight_decay = 0.0
    config.evaluation.every = 20
    config.evaluation.temperature = 1.0
    config.checkpoint.every = 20
    return config
