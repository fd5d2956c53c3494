"""The reward of the task "reasoning_gym": the scoring of the problem's own generator."""

from collections.abc import Mapping
from typing import Any

from reasoning_gym.utils import extract_answer

from jaxrl_llm.data.reasoning_gym_task import make_dataset
from jaxrl_llm.data.typed_json import from_typed_json


def score_answer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, Any]:
    """The `score` that the generator gives the answer, from 0 to 1, and the answer as `pred`.

    The answer is the text in the last `<answer>...</answer>`, 0 without one; if the prompt did not
    ask for these marks (`has_answer_tag`), it is the whole response. In an episode with tools the
    policy's last turn counts. An answer on which the generator's scoring raises scores 0, and
    `unreadable` says why.

    Raises:
      ValueError: If the row is none of this task.
    """
    missing = {"generator", "level", "settings", "entry"} - {*extra_info}
    if missing:
        rule = "this reward is for rows of data.task='reasoning_gym'"
        raise ValueError(f"extra_info lacks {', '.join(sorted(missing))}; {rule}")
    if messages := extra_info.get("messages"):
        turns = [message["content"] for message in messages if message["role"] == "assistant"]
        solution_str = turns[-1] if turns else ""
    has_tag = extra_info.get("has_answer_tag", True)
    answer = extract_answer(solution_str) if has_tag else solution_str.strip()
    dataset = make_dataset(extra_info["generator"], extra_info["level"], extra_info["settings"])
    entry = from_typed_json(extra_info["entry"])
    try:
        score, problem = float(dataset.score_answer(answer, entry)), ""
    except Exception as error:  # some generators cannot read any text as an answer
        score, problem = 0.0, f"{type(error).__name__}: {error}"
    return {"score": score, "pred": answer or "", "unreadable": problem}
