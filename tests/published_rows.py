"""Rows written anew in the columns of published datasets, by the preset that reads them."""

from typing import Any, NamedTuple


class Layout(NamedTuple):
    """A dataset's layout: rows with its columns, and what becomes of the first one."""

    job: str
    rows: list[dict[str, Any]]
    messages: list[tuple[str, str]]  # role and content: of RL the prompt, of pairs the chosen one
    answer: Any = None  # of RL the ground truth, of pairs what is rejected
    changes: dict[str, Any] = {}  # of `data` beside the preset  # noqa: RUF012


def _messages(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


_BRIEF = "Let's think step by step and output the final answer"
_AFTER, _BOXED = f'{_BRIEF} after "####".', f"{_BRIEF} within \\boxed{{}}."
_COLOURS = _messages("Name a colour.", "Red.", "And another?", "Blue.")
_GREET = _messages("Greet me.", "Good morning!")
_RUDE = _messages("Greet me.", "No.")
_TALK = [
    {"from": "human", "value": "Say moon."},
    {"from": "gpt", "value": "Moon."},
    {"from": "human", "value": "Again."},
    {"from": "gpt", "value": "Moon!"},
]
_HH = "\n\nHuman: How do I boil an egg?\n\nAssistant: In water.\n\nHuman: How long?\n\nAssistant:"
_HH_TURNS = [
    ("user", "How do I boil an egg?"), ("assistant", "In water."), ("user", "How long?")
]  # fmt: skip

LAYOUTS = {
    "gsm8k": Layout(
        "rl",
        [
            {
                "question": "Ida plants 12 rows of 100 tulips. How many tulips?",
                "answer": "She plants 12*100=<<12*100=1200>>1200 tulips.\n#### 1,200",
            },
            {"question": "Tim had 3 pears and ate 4 halves?", "answer": "3-2=1 \n#### 1"},
        ],
        [("user", f"Ida plants 12 rows of 100 tulips. How many tulips? {_AFTER}")],
        "1,200",
    ),
    "math": Layout(
        "rl",
        [
            {
                "problem": "Simplify $\\frac{4}{8}$.",
                "level": "Level 1",
                "type": "Algebra",
                "solution": "First \\boxed{4/8}, that is $\\boxed{\\frac{1}{2^{1}}}$.",
            },
            {
                "problem": "Find $2-5$.",
                "level": "Level 2",
                "type": "Prealgebra",
                "solution": "It is $\\boxed{-3}$.",
            },
        ],
        [("user", f"Simplify $\\frac{{4}}{{8}}$. {_BOXED}")],
        "\\frac{1}{2^{1}}",
    ),
    "math_500": Layout(
        "rl",
        [
            {
                "problem": "What is $7^2$?",
                "solution": "$7 \\cdot 7 = \\boxed{49}$.",
                "answer": "49",
                "subject": "Prealgebra",
                "level": 1,
                "unique_id": "test/prealgebra/1.json",
            }
        ],
        [("user", f"What is $7^2$? {_BOXED}")],
        "49",
    ),
    "rlvr": Layout(
        "rl",
        [
            {
                "messages": _messages("What is 4 + 5?"),
                "ground_truth": "9",
                "dataset": "gsm8k",
                "constraint_type": None,
                "constraint": None,
            }
        ],
        [("user", "What is 4 + 5?")],
        "9",
    ),
    "hh_rlhf": Layout(
        "reward_model",
        [
            {"chosen": f"{_HH} Ten minutes.", "rejected": f"{_HH} I don't know."},
            {
                "chosen": "\n\nHuman: Hi\n\nAssistant: Hello: you?\n\nWell?",
                "rejected": "\n\nHuman: Hi\n\nAssistant: Go.",
            },
        ],
        [*_HH_TURNS, ("assistant", "Ten minutes.")],
        "I don't know.",
    ),
    "ultrafeedback": Layout(
        "dpo",
        [
            {
                "prompt": "Greet me.",
                "prompt_id": "0af1",
                "chosen": _GREET,
                "rejected": _RUDE,
                "messages": _GREET,
                "score_chosen": 8.5,
                "score_rejected": 2.0,
            }
        ],
        [("user", "Greet me."), ("assistant", "Good morning!")],
        "No.",
    ),
    "orca_dpo": Layout(
        "dpo",
        [
            {
                "system": "You are a poet.",
                "question": "Describe the sea.",
                "chosen": "It breathes in blue.",
                "rejected": "Water.",
            },
            {"system": "", "question": "And the sky?", "chosen": "It is wide.", "rejected": "Air."},
        ],
        [
            ("system", "You are a poet."), ("user", "Describe the sea."),
            ("assistant", "It breathes in blue."),
        ],
        "Water.",
    ),
    "tulu3": Layout(
        "sft",
        [{"id": "oasst_7", "messages": _COLOURS, "source": "ai2-adapt-dev/oasst1_converted"}],
        [(message["role"], message["content"]) for message in _COLOURS],
    ),
    "sharegpt": Layout(
        "sft",
        [{"id": "x1_0", "conversations": _TALK}, {"id": "x1_1", "conversations": _TALK[:2]}],
        [("user", "Say moon."), ("assistant", "Moon."), ("user", "Again."), ("assistant", "Moon!")],
    ),
    "alpaca": Layout(
        "sft",
        [
            {
                "instruction": "Name the opposite.",
                "input": "cold",
                "output": "hot",
                "text": "Below is an instruction ...",
            },
            {"instruction": "Count to two.", "input": "", "output": "1, 2", "text": "Below ..."},
        ],
        [("user", "Name the opposite.\n\ncold"), ("assistant", "hot")],
    ),
    "dolly": Layout(
        "sft",
        [
            {
                "instruction": "Who wrote it?",
                "context": "",
                "response": "Nobody knows.",
                "category": "open_qa",
            }
        ],
        [("user", "Who wrote it?"), ("assistant", "Nobody knows.")],
    ),
}  # fmt: skip
# Without a preset: the columns of argilla/distilabel-intel-orca-dpo-pairs, over that of orca.
OTHERS = {
    "orca_dpo with other columns": Layout(
        "dpo",
        [{"system": None, "input": "Describe the sea.", "chosen": "Blue.", "rejected": "Wet."}],
        [("user", "Describe the sea."), ("assistant", "Blue.")],
        "Wet.",
        {"preset": "orca_dpo", "columns": {"prompt": "input"}},
    ),
    "columns alone": Layout(
        "rl",
        [{"q": "Capital of Peru?", "hint": 2, "a": {"value": "Lima"}, "source": "quiz"}],
        [("system", "One word."), ("user", "Capital of Peru? (2)")],
        {"value": "Lima"},
        {
            "preset": "none",
            "columns": {"answer": "a", "data_source": "source"},
            "prompt_template": "{q} ({hint})",
            "system_prompt": "One word.",
        },
    ),
}
