"""What bears loss in an episode (chapter 9)."""


def turn_masks(parts):
    """Returns (tokens, response_mask, turns) of an episode, lists of equal length.

    `turns` numbers the policy's turns from 0, and is -1 at all other tokens.

    Args:
      parts: In order, pairs (who, tokens); `who` is "prompt", "policy" or "tool". Two parts of the
        policy without another one between them are one turn. Empty parts may come.
    """
    raise NotImplementedError
