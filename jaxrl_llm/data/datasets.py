"""Prompts in tokens, the endless seeded stream of them, and examples with answers."""

import dataclasses
import functools
import itertools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_llm import console
from jaxrl_llm.config import DataConfig
from jaxrl_llm.data import shapes
from jaxrl_llm.data.encoding import without_guards
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import Row, read_rows
from jaxrl_llm.data.formats import example_of, pair_of
from jaxrl_llm.data.lengths import cut, shortened, shortened_pair
from jaxrl_llm.data.lost_text import check_dialogue, check_no_template, check_prompt
from jaxrl_llm.data.masks import Dialogue
from jaxrl_llm.data.messages import role_aliases
from jaxrl_llm.data.mixtures import Shares
from jaxrl_llm.data.pictures import Pictures, expanded, of_row, refuse_pairs, refuse_to_cut
from jaxrl_llm.data.row_report import RowReport
from jaxrl_llm.data.streaming import Made, StreamedRows
from jaxrl_llm.data.streams import MixedRows, Rows, longest, streamed_parts
from jaxrl_llm.data.tasks import (
    CALCULATOR,
    Split,
    files_of,
    misread_answer,
    prompt_row,
    task_rows,
    worked_product,
    wrong_answer,
)
from jaxrl_llm.data.tokenizer import EMPTY, prompt_text, prompt_tokens, token_bound
from jaxrl_llm.data.turns import dialogue_sequences
from jaxrl_llm.types import Example, Pair, Prompt, PromptBatch

Options = Callable[[Mapping[str, Any]], Mapping[str, Any]]

T = TypeVar("T")
Tokens = tuple[int, ...]

_NUM_FIRST = 4  # streamed rows that are looked at before the first step
_CALL_CHARACTERS = 1 << 18  # tokenized in one call, between two reports of progress

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The prompts of one split, in the order of their source.

    `prompt.index` is the row of the source: it has gaps where long prompts were dropped.
    """

    prompts: tuple[Prompt, ...]  # of streamed rows, some of the first
    rows: Rows[Prompt] = ()  # what training draws from; empty: `prompts`

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt; of streamed rows, the most that are allowed."""
        return longest(self.rows or self.prompts, lambda prompt: len(prompt.tokens))

    @property
    def identity(self) -> list[Any]:
        """What all processes must have read alike."""
        return [self.prompts, [part.pieces for part in streamed_parts(self.rows)]]

    def batches(self, num_prompts: int, limit: int = 0) -> list[PromptBatch]:
        """Returns the first `limit` prompts (0: all) in order; the last batch may be smaller."""
        longest, prompts = self.longest, self.prompts[: limit or len(self)]
        starts = range(0, len(prompts), num_prompts)
        return [PromptBatch(prompts[i : i + num_prompts], longest) for i in starts]


def load_dataset(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    seed: int,
    options_of: Options | None = None,
    pictures: Pictures | None = None,
) -> Dataset:
    """Returns the prompts of a split, tokenized, of at most `max_prompt_tokens`.

    `options_of` tells from a row's `extra_info` what its template shows beside its own options,
    such as `tools`; with it, prompts keep what they were made of. `pictures` prepares
    images; without it a row with some is a DataError. `seed` draws the prompts of the arithmetic
    task; use the same one for both splits. Where long prompts are not cut, a text that
    is too long by its number of characters is not tokenized. A prompt that is empty, or too long
    while `long_rows` is "error", is a DataError, and so is that no prompt is left. With
    `config.stream` training prompts are read when they are drawn.
    """
    if split == "train" and config.stream:
        made = functools.partial(_streamed_prompt, config, tokenizer, options_of, pictures)
        rule = "are longer than data.max_prompt_tokens"
        rows = _streamed(config, made, config.max_prompt_tokens, rule)
        first = (part.first(_NUM_FIRST) for part in streamed_parts(rows))
        return Dataset(tuple(itertools.chain.from_iterable(first)), rows)
    rows_of_task = task_rows(config, split, seed)
    if options_of is not None:
        rows_of_task = [_with_options(row, options_of) for row in rows_of_task]
    wheres = [row.get("where", f"{split} split, row {i}") for i, row in enumerate(rows_of_task)]
    pairs_of = zip(rows_of_task, wheres, strict=True)
    rows_of_task = [of_row(row, pictures, where) for row, where in pairs_of]
    texts = [
        _text(config, tokenizer, row, where)
        for row, where in zip(rows_of_task, wheres, strict=True)
    ]
    bound = token_bound(tokenizer)
    fewest = [bound(without_guards(text)) for text in texts]  # tokens of each, at least
    candidates = [i for i, n in enumerate(fewest) if _fits(config, wheres[i], n, "at least ")]
    ends = list(itertools.accumulate(len(texts[index]) for index in candidates))
    calls = itertools.groupby(
        zip(candidates, ends, strict=True), key=lambda pair: pair[1] // _CALL_CHARACTERS
    )
    prompts = []
    with console.work(f"tokenizing the {split} split", max(ends, default=0)) as advance:
        for _, pairs in calls:
            indices = [index for index, _ in pairs]
            found = prompt_tokens(tokenizer, [texts[i] for i in indices], config.chat_template)
            for i, tokens in zip(indices, found, strict=True):
                given = rows_of_task[i], texts[i], tokens, i, wheres[i]
                prompt, fewest[i] = _prompt(config, tokenizer, pictures, *given)
                if prompt is not None:
                    prompts.append(prompt)
                advance(len(texts[i]))
    if not prompts:
        raise DataError(
            f"config.data.max_prompt_tokens: all {len(texts)} prompts of the {split} split are"
            f" longer than {config.max_prompt_tokens} tokens, the shortest has"
            f"{'' if candidates else ' at least'} {min(fewest)}; raise it"
        )
    if num_dropped := len(texts) - len(prompts):
        message = "%s split: dropped %d of %d prompts longer than data.max_prompt_tokens=%d"
        logger.warning(message, split, num_dropped, len(texts), config.max_prompt_tokens)
    if split == "eval" or not config.train_weights:
        return Dataset(tuple(prompts))
    by_entry: list[list[Prompt]] = [[] for _ in config.train_files]
    for prompt in prompts:
        by_entry[rows_of_task[prompt.index]["entry"]].append(prompt)
    return Dataset(tuple(prompts), _mixed(config, by_entry))


def _with_options(row: Row, options_of: Options) -> Row:
    own = row.get("options", EMPTY)
    return {**row, "options": {**options_of(row["extra_info"]), **own}, "goes_on": True}


def _text(config: DataConfig, tokenizer: PreTrainedTokenizerBase, row: Row, where: str) -> str:
    """The text of a row's prompt, in which all of it is shown; else a DataError."""
    options = row.get("options", EMPTY)
    try:
        if config.chat_template:
            roles = role_aliases(config.role_aliases)
            check_prompt(tokenizer, row["prompt"], options, roles.values())
        else:
            check_no_template(options)
        return prompt_text(tokenizer, row["prompt"], config.chat_template, options)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _prompt(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    pictures: Pictures | None,
    row: Row,
    text: str,
    tokens: Tokens,
    index: int,
    where: str,
) -> tuple[Prompt | None, int]:
    """Returns a prompt, cut if it is to be, or None if it is dropped; and its tokens before."""
    if not tokens:
        raise DataError(f"{where}: the prompt has no tokens; leave the row out")
    tokens, images = expanded(pictures, tokens, row.get("pictures", ()), where)
    whole = len(tokens)
    if not _fits(config, where, whole):
        return None, whole
    refuse_to_cut(images, whole, config.max_prompt_tokens, "data.max_prompt_tokens", where)
    if len(tokens) > config.max_prompt_tokens:
        tokens = cut(tokens, config.max_prompt_tokens, config.long_rows)
        text = str(tokenizer.decode(list(tokens)))
    truth, info = row["reward_model"]["ground_truth"], row["extra_info"]
    text = without_guards(text)
    origin = row.get("where", "")
    prompt = Prompt(
        tokens, text, row["data_source"], truth, info, index, images=images, where=origin
    )
    if row.get("goes_on"):
        more = {"messages": tuple(row["prompt"]), "options": row["options"]}
        prompt = dataclasses.replace(prompt, **more)
    return prompt, whole


def _fits(config: DataConfig, where: str, num_tokens: int, at_least: str = "") -> bool:
    """Returns whether a prompt is kept, whole or cut; if it is neither nor dropped, raises."""
    if num_tokens <= config.max_prompt_tokens or config.long_rows != "error":
        return num_tokens <= config.max_prompt_tokens or config.long_rows != "drop"
    raise DataError(
        f"{where}: the prompt has {at_least}{num_tokens} tokens, more than"
        f" data.max_prompt_tokens={config.max_prompt_tokens}; raise it or choose"
        " data.long_rows 'drop', 'left', 'right' or 'middle'"
    )


def _streamed_prompt(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    options_of: Options | None,
    pictures: Pictures | None,
    row: Row,
    where: str,
    index: int,
) -> tuple[Prompt, ...]:
    row = of_row(prompt_row(config, row, where), pictures, where)
    if options_of is not None:
        row = _with_options(row, options_of)
    text = _text(config, tokenizer, row, where)
    (tokens,) = prompt_tokens(tokenizer, [text], config.chat_template)
    prompt, _ = _prompt(config, tokenizer, pictures, row, text, tokens, index, where)
    return (prompt,) if prompt is not None else ()


def _streamed(config: DataConfig, made: Made[T], longest: int, rule: str) -> Rows[T]:
    """Returns the rows of the training files, each made when it is asked for."""
    paths = files_of(config, "train")
    if not config.train_weights:
        return StreamedRows(paths, made, longest, rule)
    return _mixed(config, [StreamedRows([path], made, longest, rule) for path in paths])


def _mixed(config: DataConfig, parts: Sequence[Sequence[T] | StreamedRows[T]]) -> Rows[T]:
    """Returns the rows of each of `train_files` in their shares."""
    for path, part in zip(config.train_files, parts, strict=True):
        if not len(part):
            raise DataError(f"{path}: all rows of it are too long; leave it and its weight out")
    return MixedRows(tuple(parts), Shares.of(config))


def worked_examples(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    seed: int,
    max_tokens: int = 0,
    pictures: Pictures | None = None,
) -> Rows[Example]:
    """Returns every row with its answer, which ends with the end token and bears the loss.

    A dialogue of files gives several examples where the template rewrites turns and
    `config.rewritten_turns` is "split"; see `turns.dialogue_sequences`.

    With `config.arithmetic_errors` above 0 every row of the arithmetic task comes four times, each
    time wrong in one step with that probability; of the products that is the share whose result is
    wrong. Rows of files with more than `max_tokens` (0: any
    number) are treated as `config.long_rows` says.
    """
    if config.task == "files":
        report = RowReport(split, "sequences")
        made = functools.partial(_examples_of_row, config, tokenizer, max_tokens, pictures, report)
        return _of_files(config, split, made, max_tokens, report)
    prompts = load_dataset(config, tokenizer, split, seed, pictures=pictures).prompts
    if config.task == "products":
        return _worked_products(config, tokenizer, prompts, seed)
    texts = [prompt.extra_info["answer"] for prompt in prompts]
    if config.task == "shapes":
        texts = [
            shapes.taught(prompt.extra_info, config.arithmetic_errors, seed) for prompt in prompts
        ]
    if config.task == "arithmetic" and config.arithmetic_errors:
        prompts, texts = prompts * 4, texts * 4
        for i, prompt in enumerate(prompts):
            attempt = i * 4 // len(prompts)
            draw = random.Random(f"teacher {seed} {attempt} {prompt.extra_info['question']}")
            if draw.random() < config.arithmetic_errors:
                texts[i] = wrong_answer(prompt.extra_info, seed, attempt)
    return _examples(prompts, _responses(tokenizer, texts))


def _worked_products(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    seed: int,
) -> list[Example]:
    made = []
    for prompt in prompts:
        draw = random.Random(f"guess {seed} {prompt.extra_info['question']}")
        wrong = draw if draw.random() < config.arithmetic_errors else None
        asked = {"role": "user", "content": prompt.extra_info["question"]}
        messages = [asked, *worked_product(prompt.extra_info, wrong)]
        options = {"tools": [CALCULATOR]}
        dialogue = Dialogue(messages, 1, options, f"products, row {prompt.index}")
        found = dialogue_sequences(
            tokenizer, dialogue, config.chat_template, config.rewritten_turns
        )
        made += [sequence.example for sequence in found.sequences]
    return made


def preference_pairs(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    seed: int,
    name: str = "",
    max_tokens: int = 0,
) -> Rows[Pair]:
    """Returns the pairs of files, or two of every arithmetic row: its prompt with two answers.

    Of files, pairs with more than `max_tokens` together (0: any number) are treated as
    `config.long_rows` says; those whose two answers are the same tokens are left out.

    Of the arithmetic task, the chosen answer is the worked one. The rejected answer of a row's
    first pair is wrong by 1 to 9 in one step, never below zero, and later steps continue from
    there; that of the second pair adds correctly, but misreads a digit. So both end in a wrong
    result. All first pairs come before all second ones. The model `name` that learns from the
    pairs, the seed and the row choose the mistakes.
    """
    if config.task == "files":
        report = RowReport(split, "pairs")
        made = functools.partial(_pair_of_row, config, tokenizer, max_tokens, report)
        return _of_files(config, split, made, max_tokens, report)
    if config.task != "arithmetic":
        message = f"{config.task!r} has no preference pairs; use 'arithmetic' or 'files'"
        raise DataError(f"config.data.task: {message}")
    prompts = load_dataset(config, tokenizer, split, seed).prompts
    chosen = _responses(tokenizer, [prompt.extra_info["answer"] for prompt in prompts])
    salt = f"{name} {seed}".strip()
    wrong = [wrong_answer(prompt.extra_info, salt) for prompt in prompts]
    wrong += [misread_answer(prompt.extra_info, salt) for prompt in prompts]
    answers = zip(chosen * 2, _responses(tokenizer, wrong), strict=True)
    return [
        Pair(*_examples([prompt] * 2, both))
        for prompt, both in zip(prompts * 2, answers, strict=True)
    ]


def _of_files(
    config: DataConfig, split: Split, made: Made[T], most: int, report: RowReport
) -> Rows[T]:
    """Returns what becomes of every row of a split's files; that nothing is left is a DataError."""
    rule = f"have more tokens than trainer.max_sequence_tokens={most}, or no answer after"
    rule += " data.long_rows has cut them; raise it"
    if report.noun == "pairs" and config.stream:
        rule += ", or correct the pairs whose two answers are equal"
    if split == "train" and config.stream:
        report.reports_progress = True
        rows = _streamed(config, made, most, rule)
        for part in streamed_parts(rows):
            part.first(_NUM_FIRST)  # wrong columns are told before any work
        return rows
    index = itertools.count()
    parts = [
        list(
            itertools.chain.from_iterable(
                made(row, where, next(index)) for where, row in read_rows([path])
            )
        )
        for path in files_of(config, split)
    ]
    if not any(parts):
        only = report.only_reason
        raise DataError(f"config.data.{split}_files: all {report.num_rows} rows {only or rule}")
    report.log()
    if split == "train" and config.train_weights:
        return _mixed(config, parts)
    return list(itertools.chain.from_iterable(parts))


def _examples_of_row(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    most: int,
    pictures: Pictures | None,
    report: RowReport,
    row: Row,
    where: str,
    index: int,
) -> tuple[Example, ...]:
    dialogue = example_of(row, where, config.prompt_column, role_aliases(config.role_aliases))
    checked = {"prompt": dialogue.messages, "images": row.get("images")}
    checked = of_row(checked, pictures, where)
    dialogue = dialogue._replace(messages=checked["prompt"])
    check_shown(config, tokenizer, dialogue)
    found = dialogue_sequences(tokenizer, dialogue, config.chat_template, config.rewritten_turns)
    kept = []
    for one, num_messages, _ in found.sequences:
        if pictures is not None:
            shown = checked.get("pictures", ())
            if num_messages < len(dialogue.messages):  # a beginning shows the first images
                shown = shown[: _num_images(dialogue.messages[:num_messages])]
            counts, images = pictures.placed(one.tokens, shown, where)
            tokens, mask = (tuple(np.repeat(values, counts).tolist()) for values in one[:2])
            one = Example(tokens, mask, images)
        if most and config.long_rows != "drop":
            setting = "trainer.max_sequence_tokens"
            refuse_to_cut(one.images, len(one.tokens), most, setting, where)
        if (short := shortened(one, most, config.long_rows, where)) is not None:
            kept.append(short)
    report.count(
        num_sequences=len(kept),
        num_long=len(found.sequences) - len(kept),
        num_rewritten=found.num_rewritten if config.rewritten_turns == "whole" else 0,
    )
    return tuple(kept)


def _num_images(messages: Sequence[Mapping[str, Any]]) -> int:
    contents = [message.get("content") for message in messages]
    parts = itertools.chain.from_iterable(c for c in contents if isinstance(c, list))
    return sum(part.get("type") == "image" for part in parts)


def check_shown(config: DataConfig, tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue) -> None:
    """Raises DataError if the template would leave out something of a dialogue."""
    try:
        if config.chat_template and tokenizer.chat_template:
            roles = role_aliases(config.role_aliases).values()
            messages, first, options = dialogue[:3]
            check_dialogue(tokenizer, messages, options, first, roles)
        elif not config.chat_template:
            check_no_template(dialogue.options)
    except DataError as error:
        raise DataError(f"{dialogue.where}: {error}") from error


def _pair_of_row(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    most: int,
    report: RowReport,
    row: Row,
    where: str,
    index: int,
) -> tuple[Pair, ...]:
    both = pair_of(row, where, config.prompt_column, role_aliases(config.role_aliases))
    refuse_pairs(row, [*both[0].messages, *both[1].messages], where)
    for dialogue in both:
        check_shown(config, tokenizer, dialogue)
    sequences, num_rewritten = [], 0
    for name, dialogue in zip(("chosen", "rejected"), both, strict=True):
        found = dialogue_sequences(
            tokenizer, dialogue, config.chat_template, config.rewritten_turns
        )
        if len(found.sequences) > 1:
            raise DataError(
                f"{where}: {name} has {found.num_rewritten} turns that the chat template writes in"
                " another way once others follow, as Qwen3 drops their thinking, and an answer of a"
                " pair is one sequence; put the earlier turns into the prompt, or set"
                " data.rewritten_turns='whole' to train them as the template writes them"
            )
        sequences.append(found.sequences[0].example)
        num_rewritten += found.num_rewritten
    pair = shortened_pair(Pair(*sequences), most, config.long_rows, where)
    is_equal = pair is not None and pair.chosen == pair.rejected
    is_kept = pair is not None and not is_equal
    report.count(
        num_sequences=int(is_kept),
        num_long=int(pair is None),
        num_equal=int(is_equal),
        num_rewritten=num_rewritten,
    )
    return (pair,) if pair is not None and is_kept else ()


def _examples(prompts: Sequence[Prompt], responses: Sequence[Tokens]) -> list[Example]:
    return [
        Example(
            prompt.tokens + answer,
            (False,) * len(prompt.tokens) + (True,) * len(answer),
            prompt.images,
        )
        for prompt, answer in zip(prompts, responses, strict=True)
    ]


def _responses(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Tokens]:
    tokens = prompt_tokens(tokenizer, texts, chat_template=True)  # without special tokens
    return [(*answer, tokenizer.eos_token_id) for answer in tokens]
