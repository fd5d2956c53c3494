"""What all agents share: the calculator, and the reward."""

from jaxrl_llm.agents import builtin_tools

MAX_TURNS = 3


def calculator(expression: str = "") -> str:
    """Computes the value of an arithmetic expression.

    Args:
        expression: The expression.
    """
    try:
        return builtin_tools.calculator(expression)
    except Exception as error:
        return f"Error: {error}"


def reward(answer, row):
    return float(str(answer or "").strip() == f"#{row['ground_truth']}")
