"""Turns of chats over HTTP: each prompt's beginning is computed once."""

import concurrent.futures

import httpx
import numpy as np
import pytest
import serving_model
from serving_model import HANGS_S

pytestmark = pytest.mark.slow
CHATS, TURNS, CLIENTS = 64, 10, 10
NEW_TOKENS, SAMPLED = 12, 5


def play(url, chat):
    """One chat of several turns; returns its replies as token ids."""
    random, dialogue, replies = np.random.default_rng(chat), [], []
    with httpx.Client(timeout=HANGS_S) as client:
        for turn in range(TURNS):
            dialogue += random.integers(3, 300, NEW_TOKENS).tolist()
            body = {
                "model": "tiny-model",
                "prompt": dialogue,
                "max_tokens": SAMPLED,
                "seed": turn,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            reply = client.post(url + "/v1/completions", json=body)
            replies.append(reply.json()["choices"][0]["token_ids"])
            dialogue += replies[-1]
    return replies


def play_all(url, chats):
    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(play, [url] * len(chats), chats))


def test_64_chats_of_ten_turns_from_ten_clients_compute_what_is_new(tmp_path):
    folder = tmp_path / "tiny-model"
    serving_model.make_folder(folder)
    flags = ("--num_slots=16", "--warm_up_prompts=0")
    with serving_model.serving(folder, *flags) as (server, url):
        replies, sizes = play_all(url, range(CHATS)), []
        computed = serving_model.metric(url, "prefilled_tokens_total")
        num_new = CHATS * TURNS * NEW_TOKENS
        print(f"computed per new token: {computed / num_new:.3f}")
        assert computed <= 1.1 * num_new
        hits = serving_model.metric(url, "prefix_cache_hits_total")
        assert computed + hits == serving_model.metric(url, "prefix_cache_queries_total")
        # Other chats evict these, and they are computed again: the same replies.
        for _ in range(3):
            assert play_all(url, range(CHATS)) == replies
            sizes.append(server.rss_bytes())
        print("MiB after each round:", [size >> 20 for size in sizes])
        assert sizes[-1] - sizes[0] < 8 * 2**20
    with serving_model.serving(folder, *flags, "--noprefix_caching") as (_, url):
        assert play_all(url, range(12)) == replies[:12]
        assert serving_model.metric(url, "prefix_cache_queries_total") == 0
        assert serving_model.metric(url, "prefilled_tokens_total") > 4 * 12 * TURNS * NEW_TOKENS
