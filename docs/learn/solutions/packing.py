"""Several sequences in one row (chapter 8)."""


def pack(lengths, width):
    if max(lengths, default=0) > width:
        raise ValueError(f"{max(lengths)} tokens do not fit a row of {width}")
    rows, room = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [row for row, free in enumerate(room) if free >= lengths[i]]
        if not fits:
            rows.append([])
            room.append(width)
            fits = [len(rows) - 1]
        rows[fits[0]].append(i)
        room[fits[0]] -= lengths[i]
    return rows


def layout(row, lengths, width):
    segments, positions = [], []
    for number, i in enumerate(row, start=1):
        segments += [number] * lengths[i]
        positions += range(lengths[i])
    rest = width - len(segments)
    return segments + [0] * rest, positions + [0] * rest
