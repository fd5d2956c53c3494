"""Stop strings in the text of tokens, however the text is cut into tokens and chunks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rollout import stopping

PIECES = ["a", "b", "ab", "", "ba", "abba", "é"]  # token 3 has no text


def decode(tokens):
    return "".join(PIECES[t] for t in tokens)


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([0, 1, 2, 4, 5, 6]), max_size=30),
    stops=st.lists(st.text("abé", min_size=1, max_size=5), min_size=1, max_size=3),
    chunks=st.lists(st.integers(1, 7), min_size=1),
)
def test_the_first_token_that_completes_one_is_found(tokens, stops, chunks):
    want = next(
        (n for n in range(len(tokens) + 1) if any(s in decode(tokens[:n]) for s in stops)), 0
    )
    seen = found = 0
    while seen < len(tokens) and not found:
        end = seen + chunks[seen % len(chunks)]
        found = stopping.num_tokens_to_stop(tokens[:end], seen, stops, decode)
        seen = end
    assert found == want
    text = stopping.text_before(decode(tokens), stops)
    assert not any(s in text for s in stops)
    assert decode(tokens).startswith(text)
    assert (text == decode(tokens)) == (want == 0)


def test_tokens_without_text_are_bridged():
    assert stopping.num_tokens_to_stop([0, 3, 3, 3, 1], 4, ["ab"], decode) == 5
