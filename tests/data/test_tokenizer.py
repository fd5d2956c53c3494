"""The character tokenizer, folders that cannot be loaded, and prompts as tokens."""

import string

import pytest

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import character_tokenizer, load_tokenizer, render_prompts

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4="}]


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@pytest.fixture
def folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_every_character_is_one_token_and_comes_back(tokenizer):
    text = string.digits + string.ascii_letters + string.punctuation + " \n  a , b .  don 't"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokenizer) == 104
    assert tokenizer.pad_token_id == 0 and tokenizer.eos_token_id == 1
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_save_and_load_round_trip(tokenizer, folder):
    loaded = load_tokenizer(str(folder))
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    assert render_prompts(loaded, [CHAT]) == render_prompts(tokenizer, [CHAT])
    assert loaded.decode(loaded.encode(" a , b\n")) == " a , b\n"


def test_rendering_is_the_template_with_an_open_turn(tokenizer):
    (tokens,), (text,) = render_prompts(tokenizer, [CHAT])
    assert text == "<bos><system>Add.<eos><user>3+4=<eos><assistant>"
    direct = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)
    assert list(tokens) == list(direct["input_ids"])
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "Add.3+4="


def test_rendering_without_a_template_joins_the_contents(tokenizer):
    (tokens,), (text,) = render_prompts(tokenizer, [CHAT], chat_template=False)
    assert text == "Add.\n3+4="
    assert list(tokens) == tokenizer.encode("Add.\n3+4=")


def test_rows_do_not_depend_on_their_neighbours(tokenizer):
    other = [{"role": "user", "content": "a much longer question than the first"}]
    alone, _ = render_prompts(tokenizer, [CHAT])
    together, _ = render_prompts(tokenizer, [other, CHAT, other])
    assert together[1] == alone[0]
    assert render_prompts(tokenizer, []) == ([], [])


def test_a_template_file_replaces_the_folders_own(folder, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}!")
    loaded = load_tokenizer(str(folder), str(template))
    assert render_prompts(loaded, [CHAT])[1] == ["Add.3+4=!"]
    with pytest.raises(DataError, match=r"absent\.jinja"):
        load_tokenizer(str(folder), str(tmp_path / "absent.jinja"))


def test_template_errors_are_told(tokenizer, folder, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('only users, please') }}")
    loaded = load_tokenizer(str(folder), str(template))
    with pytest.raises(DataError, match=r"refuses .*Add\..*only users, please"):
        render_prompts(loaded, [CHAT])
    loaded.chat_template = None
    with pytest.raises(DataError, match=r"set model\.chat_template"):
        render_prompts(loaded, [CHAT])


def test_what_cannot_be_loaded_is_named(folder, tmp_path):
    with pytest.raises(DataError, match=r"absent.*no such folder"):
        load_tokenizer(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no tokenizer file .* tokenizer\.json"):
        load_tokenizer(str(tmp_path / "empty"))
    (folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(DataError, match=r"cannot be read: JSONDecodeError"):
        load_tokenizer(str(folder))


def test_a_tokenizer_without_an_end_is_refused(tokenizer, tmp_path):
    endless = character_tokenizer()
    endless.eos_token = None
    endless.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="no end-of-sequence token"):
        load_tokenizer(str(tmp_path))
