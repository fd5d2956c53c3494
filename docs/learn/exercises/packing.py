"""Several sequences in one row (chapter 8)."""


def pack(lengths, width):
    """Returns rows, each a list of indices of sequences, of at most `width` tokens together.

    First fit, longest first: each sequence goes into the first row that has room. Every index comes
    once. ValueError if one is longer than `width`.
    """
    raise NotImplementedError


def layout(row, lengths, width):
    """Returns (segment_ids, positions) of a row, two lists of `width` numbers.

    Segments count from 1 in the order of `row`; 0 is padding. Positions count from 0 in each
    segment and are 0 in padding.
    """
    raise NotImplementedError
