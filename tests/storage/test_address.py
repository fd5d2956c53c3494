"""Addresses: what each text means, and the error of one that means nothing."""

import pytest

from jaxrl_llm.storage.address import (
    AddressError,
    BucketAddress,
    HubAddress,
    LocalAddress,
    is_remote,
    parse_address,
    same_source,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("hf://org/name", HubAddress("org/name")),
        ("hf://org/name/", HubAddress("org/name")),
        ("hf://models/org/name", HubAddress("org/name")),
        ("hf://org/name@v1.0", HubAddress("org/name", revision="v1.0")),
        ("hf://org/name@v1/sub/folder", HubAddress("org/name", revision="v1", path="sub/folder")),
        ("hf://org/name/sub@2x.png", HubAddress("org/name", path="sub@2x.png")),
        ("hf://org/name@refs/pr/3/a", HubAddress("org/name", revision="refs/pr/3", path="a")),
        ("hf://org/name@a%2Fb", HubAddress("org/name", revision="a/b")),
        (f"hf://org/name@{COMMIT}", HubAddress("org/name", "model", COMMIT, "", COMMIT)),
        (f"hf://org/name@main/x#{COMMIT}", HubAddress("org/name", path="x", commit=COMMIT)),
        (
            "hf://datasets/openai/gsm8k/main/train-*.parquet",
            HubAddress("openai/gsm8k", "dataset", path="main/train-*.parquet"),
        ),
        (
            "hf://datasets/openai/gsm8k@refs/convert/parquet/main/0.parquet",
            HubAddress("openai/gsm8k", "dataset", "refs/convert/parquet", "main/0.parquet"),
        ),
        ("gs://bucket/a/b/", BucketAddress("gs", "bucket/a/b")),
        ("s3://bucket", BucketAddress("s3", "bucket")),
        ("memory://a", BucketAddress("memory", "a")),
        ("file:///a%20b/c", LocalAddress("/a b/c")),
        ("/a/b", LocalAddress("/a/b")),
        ("org/name", LocalAddress("org/name")),
        ("a:b/c", LocalAddress("a:b/c")),
    ],
)
def test_an_address_means_one_thing_and_is_written_back(text, expected):
    assert parse_address(text) == expected
    assert parse_address(expected.text) == expected


def test_short_names_are_of_the_expected_type():
    assert parse_address("org/name", "model") == HubAddress("org/name")
    assert parse_address("org/name@v1", "dataset") == HubAddress("org/name", "dataset", "v1")
    assert parse_address("org/name@a%2Fb", "model").revision == "a/b"
    for path in ("name", "./org/name", "/org/name", "a/b/c", "../name", "org/na me", "org/-name"):
        assert parse_address(path, "model") == LocalAddress(path)


def test_a_local_folder_is_preferred_to_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_remote("org/name", "model")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse_address("org/name", "model") == LocalAddress("org/name")
    assert is_remote("hf://org/name", "model")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "empty"),
        ("hg://org/name", r"hg:// is not known; did you mean hf://org/name\?"),
        ("gcss://bucket/a", r"did you mean gcs://bucket/a\?"),
        ("qqqqqqqq://b", "write a path, hf://"),
        ("hf:/org/name", "two slashes are missing; write hf://org/name"),
        ("gs:bucket/a", "write gs://bucket/a"),
        ("hf://name", "'name' is no name of the form org/name"),
        ("hf://", "is no name of the form"),
        ("hf://org/name@", "no revision behind @"),
        ("hf://org/name@a@b", "two @"),
        ("hf://org/name/../x", "leads out of the repository"),
        ("hf://org/na..me", "is no name of the form"),
        ("hf://spaces/org/name", "spaces cannot be read"),
        ("gs://", "names no bucket"),
        ("file://host/a", "a host is not supported"),
        ("org/name@", "one revision"),
        ("org/name@a@b", "one revision"),
        ("https://huggingface.co/org/name", "write hf://org/name@main"),
        ("https://huggingface.co/org/name/tree/v1/sub", "write hf://org/name@v1/sub"),
        ("huggingface.co/datasets/org/name", "write hf://datasets/org/name@main"),
    ],
)
def test_what_is_no_address_is_corrected(text, message):
    with pytest.raises(AddressError, match=message):
        parse_address(text, "model")


def test_the_same_source_at_another_commit():
    pinned = f"hf://org/name@main#{COMMIT}"
    assert same_source("org/name", pinned, "model")
    assert same_source("hf://org/name", pinned)
    assert not same_source("hf://org/name@v1", pinned)
    assert not same_source("org/name", pinned)  # a local path, if no name is expected
    assert not same_source(f"hf://org/name@{COMMIT}", pinned)
