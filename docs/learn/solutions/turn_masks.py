"""What bears loss in an episode (chapter 9)."""


def turn_masks(parts):
    tokens, mask, turns, turn, before = [], [], [], -1, ""
    for who, part in parts:
        if not part:
            continue
        turn += who == "policy" and before != "policy"
        tokens += part
        mask += [who == "policy"] * len(part)
        turns += [turn if who == "policy" else -1] * len(part)
        before = who
    return tokens, mask, turns
