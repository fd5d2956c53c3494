"""Tokenized datasets: prompts for RL, examples with answers for SFT, preference pairs."""

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
from jaxrl_llm.data import counting_task
from jaxrl_llm.data.chat.formats import desirable_label, preference_dialogues, sft_dialogue
from jaxrl_llm.data.chat.loss_masks import Dialogue
from jaxrl_llm.data.chat.lost_text import check_dialogue, check_no_template, check_prompt
from jaxrl_llm.data.chat.messages import role_aliases
from jaxrl_llm.data.chat.turns import dialogue_sequences
from jaxrl_llm.data.encoding import without_guards
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import Row, read_rows
from jaxrl_llm.data.images import (
    ImagePreprocessor,
    expand_tokens,
    refuse_pairs,
    refuse_to_cut,
    with_images,
)
from jaxrl_llm.data.mixtures import MixtureSchedule
from jaxrl_llm.data.rows.row_mapping import example_columns, pair_columns
from jaxrl_llm.data.rows.row_report import RowReport
from jaxrl_llm.data.streaming import MakeSequences, StreamedRows
from jaxrl_llm.data.streams import MixedRows, Rows, max_size, streamed_parts
from jaxrl_llm.data.tasks import (
    CALCULATOR,
    Split,
    misread_answer,
    prompt_row,
    split_files,
    task_rows,
    worked_product,
    wrong_answer,
)
from jaxrl_llm.data.tokenizer import EMPTY, prompt_text, prompt_tokens, token_bound
from jaxrl_llm.data.truncation import truncate, truncate_example, truncate_pair
from jaxrl_llm.types import Example, PreferencePair, Prompt, PromptBatch

Options = Callable[[Mapping[str, Any]], Mapping[str, Any]]

T = TypeVar("T")
Tokens = tuple[int, ...]

_NUM_FIRST = 4  # streamed rows that are looked at before the first step
_CALL_CHARACTERS = 1 << 18  # tokenized in one call, between two reports of progress

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The prompts of one split, in the order of their source.

    `prompt.index` is the row number in the source, with gaps where long prompts were dropped.
    """

    prompts: tuple[Prompt, ...]  # of a streamed dataset, a few of the first ones
    rows: Rows[Prompt] = ()  # the rows training draws from; empty: `prompts`

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt in tokens; for streamed rows, the configured maximum."""
        return max_size(self.rows or self.prompts, lambda prompt: len(prompt.tokens))

    @property
    def identity(self) -> list[Any]:
        """Contents that must be equal on all processes."""
        return [self.prompts, [part.pieces for part in streamed_parts(self.rows)]]

    def batches(self, num_prompts: int, limit: int = 0) -> list[PromptBatch]:
        """Returns the first `limit` prompts (0: all) in order; the last batch may be smaller."""
        longest, prompts = self.max_prompt_tokens, self.prompts[: limit or len(self)]
        starts = range(0, len(prompts), num_prompts)
        return [PromptBatch(prompts[i : i + num_prompts], longest) for i in starts]


def load_dataset(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    seed: int,
    options_of: Options | None = None,
    image_processor: ImagePreprocessor | None = None,
) -> Dataset:
    """Loads and tokenizes the prompts of a split, each of at most `max_prompt_tokens` tokens.

    Where long prompts are dropped or refused, a text whose number of characters already proves it
    too long is not tokenized. With `config.stream` training prompts are read when they are drawn.

    Args:
      seed: Draws the prompts of the generated tasks; use the same one for both splits.
      options_of: Template options, such as `tools`, derived from a row's `extra_info`; the row's
        own options take precedence. With it, prompts keep their messages and options.
      image_processor: Prepares images; without it a row with images is a DataError.

    Raises:
      DataError: If a prompt is empty, is too long while `long_rows` is "error", or none is left.
    """
    if split == "train" and config.stream:
        make_prompt = functools.partial(
            _streamed_prompt, config, tokenizer, options_of, image_processor
        )
        rule = "are longer than data.max_prompt_tokens"
        rows = _streamed_rows(config, make_prompt, config.max_prompt_tokens, rule)
        first = (part.first(_NUM_FIRST) for part in streamed_parts(rows))
        return Dataset(tuple(itertools.chain.from_iterable(first)), rows)
    rows_of_task = task_rows(config, split, seed)
    if options_of is not None:
        rows_of_task = [_with_options(row, options_of) for row in rows_of_task]
    wheres = [row.get("where", f"{split} split, row {i}") for i, row in enumerate(rows_of_task)]
    rows_and_wheres = zip(rows_of_task, wheres, strict=True)
    rows_of_task = [with_images(row, image_processor, where) for row, where in rows_and_wheres]
    texts = [
        _rendered_prompt(config, tokenizer, row, where)
        for row, where in zip(rows_of_task, wheres, strict=True)
    ]
    bound = token_bound(tokenizer)
    min_lengths = [bound(without_guards(text)) for text in texts]  # lower bounds in tokens
    candidates = [
        i for i, n in enumerate(min_lengths) if _is_kept(config, wheres[i], n, "at least ")
    ]
    ends = list(itertools.accumulate(len(texts[index]) for index in candidates))
    calls = itertools.groupby(
        zip(candidates, ends, strict=True), key=lambda pair: pair[1] // _CALL_CHARACTERS
    )
    prompts = []
    with console.show_progress(f"tokenizing the {split} split", max(ends, default=0)) as advance:
        for _, pairs in calls:
            indices = [index for index, _ in pairs]
            token_lists = prompt_tokens(
                tokenizer, [texts[i] for i in indices], config.chat_template
            )
            for i, tokens in zip(indices, token_lists, strict=True):
                prompt, min_lengths[i] = _make_prompt(
                    config,
                    tokenizer,
                    image_processor,
                    rows_of_task[i],
                    texts[i],
                    tokens=tokens,
                    index=i,
                    where=wheres[i],
                )
                if prompt is not None:
                    prompts.append(prompt)
                advance(len(texts[i]))
    if not prompts:
        raise DataError(
            f"config.data.max_prompt_tokens: all {len(texts)} prompts of the {split} split are"
            f" longer than {config.max_prompt_tokens} tokens, the shortest has"
            f"{'' if candidates else ' at least'} {min(min_lengths)}; raise it"
        )
    if num_dropped := len(texts) - len(prompts):
        message = "%s split: dropped %d of %d prompts longer than data.max_prompt_tokens=%d"
        logger.warning(message, split, num_dropped, len(texts), config.max_prompt_tokens)
    if split == "eval" or not config.train_weights:
        return Dataset(tuple(prompts))
    by_entry: list[list[Prompt]] = [[] for _ in config.train_files]
    for prompt in prompts:
        by_entry[rows_of_task[prompt.index]["entry"]].append(prompt)
    return Dataset(tuple(prompts), _mixed_rows(config, by_entry))


def _with_options(row: Row, options_of: Options) -> Row:
    own = row.get("options", EMPTY)
    return {**row, "options": {**options_of(row["extra_info"]), **own}, "goes_on": True}


def _rendered_prompt(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, row: Row, where: str
) -> str:
    """Renders a row's prompt; raises DataError if the template would leave out a part of it."""
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


def _make_prompt(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    image_processor: ImagePreprocessor | None,
    row: Row,
    text: str,
    tokens: Tokens,
    index: int,
    where: str,
) -> tuple[Prompt | None, int]:
    """Builds a prompt, truncated if configured, or None if it is dropped; and its full length."""
    if not tokens:
        raise DataError(f"{where}: the prompt has no tokens; leave the row out")
    tokens, images = expand_tokens(image_processor, tokens, row.get("prompt_images", ()), where)
    whole = len(tokens)
    if not _is_kept(config, where, whole):
        return None, whole
    refuse_to_cut(images, whole, config.max_prompt_tokens, "data.max_prompt_tokens", where)
    if len(tokens) > config.max_prompt_tokens:
        tokens = truncate(tokens, config.max_prompt_tokens, config.long_rows)
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


def _is_kept(config: DataConfig, where: str, num_tokens: int, at_least: str = "") -> bool:
    """Whether a prompt of this length is kept, whole or truncated; raises if it is an error."""
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
    image_processor: ImagePreprocessor | None,
    row: Row,
    where: str,
    index: int,
) -> tuple[Prompt, ...]:
    row = with_images(prompt_row(config, row, where), image_processor, where)
    if options_of is not None:
        row = _with_options(row, options_of)
    text = _rendered_prompt(config, tokenizer, row, where)
    (tokens,) = prompt_tokens(tokenizer, [text], config.chat_template)
    prompt, _ = _make_prompt(config, tokenizer, image_processor, row, text, tokens, index, where)
    return (prompt,) if prompt is not None else ()


def _streamed_rows(
    config: DataConfig, make: MakeSequences[T], max_tokens: int, rule: str
) -> Rows[T]:
    """The rows of the training files, each processed when it is drawn."""
    paths = split_files(config, "train")
    if not config.train_weights:
        return StreamedRows(paths, make, max_tokens, rule)
    return _mixed_rows(config, [StreamedRows([path], make, max_tokens, rule) for path in paths])


def _mixed_rows(config: DataConfig, parts: Sequence[Sequence[T] | StreamedRows[T]]) -> Rows[T]:
    """Mixes the rows of `train_files` in their configured shares."""
    for path, part in zip(config.train_files, parts, strict=True):
        if not len(part):
            raise DataError(f"{path}: all rows of it are too long; leave it and its weight out")
    return MixedRows(tuple(parts), MixtureSchedule.from_config(config))


def worked_examples(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    seed: int,
    max_tokens: int = 0,
    image_processor: ImagePreprocessor | None = None,
) -> Rows[Example]:
    """Loads SFT examples: each row with its answer, which ends with the end token and bears loss.

    A dialogue from files gives several examples where the template rewrites turns and
    `config.rewritten_turns` is "split"; see `turns.dialogue_sequences`. Rows of files with more
    than `max_tokens` (0: no limit) are treated according to `config.long_rows`.

    `config.arithmetic_errors` is the share of wrong answers in the generated tasks. Rows of the
    arithmetic task then come four times, each time wrong in one step with that probability.
    """
    if config.task == "files":
        report = RowReport(split, "sequences")
        make = functools.partial(
            _examples_of_row, config, tokenizer, max_tokens, image_processor, report
        )
        return _rows_of_files(config, split, make, max_tokens, report)
    prompts = load_dataset(config, tokenizer, split, seed, image_processor=image_processor).prompts
    if config.task == "products":
        return _worked_products(config, tokenizer, prompts, seed)
    texts = [prompt.extra_info["answer"] for prompt in prompts]
    if config.task == "shapes":
        texts = [
            counting_task.warm_start_answer(prompt.extra_info, config.arithmetic_errors, seed)
            for prompt in prompts
        ]
    if config.task == "arithmetic" and config.arithmetic_errors:
        prompts, texts = prompts * 4, texts * 4
        for i, prompt in enumerate(prompts):
            attempt = i * 4 // len(prompts)
            draw = random.Random(f"teacher {seed} {attempt} {prompt.extra_info['question']}")
            if draw.random() < config.arithmetic_errors:
                texts[i] = wrong_answer(prompt.extra_info, seed, attempt)
    return _with_answers(prompts, _answer_tokens(tokenizer, texts))


def _worked_products(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    seed: int,
) -> list[Example]:
    examples = []
    for prompt in prompts:
        draw = random.Random(f"guess {seed} {prompt.extra_info['question']}")
        wrong = draw if draw.random() < config.arithmetic_errors else None
        asked = {"role": "user", "content": prompt.extra_info["question"]}
        messages = [asked, *worked_product(prompt.extra_info, wrong)]
        options = {"tools": [CALCULATOR]}
        dialogue = Dialogue(messages, 1, options, f"products, row {prompt.index}")
        split = dialogue_sequences(
            tokenizer, dialogue, config.chat_template, config.rewritten_turns
        )
        examples += [sequence.example for sequence in split.sequences]
    return examples


def preference_pairs(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    seed: int,
    name: str = "",
    max_tokens: int = 0,
) -> Rows[PreferencePair]:
    """Loads preference pairs from files, or generates two for every row of the arithmetic task.

    Pairs of files that have more than `max_tokens` together (0: no limit) are treated according to
    `config.long_rows`; pairs with two equal answers are left out.

    In the arithmetic task the chosen answer is the worked one. The rejected answer of a row's first
    pair is wrong by 1 to 9 in one step, never below zero, and later steps continue from there; that
    of the second pair adds correctly but misreads a digit. So both end in a wrong result. All first
    pairs come before all second ones. The mistakes are drawn by `name` (the model that learns from
    the pairs), the seed and the row.
    """
    if config.task == "files":
        report = RowReport(split, "pairs")
        make = functools.partial(_pair_of_row, config, tokenizer, max_tokens, report)
        return _rows_of_files(config, split, make, max_tokens, report)
    if config.task != "arithmetic":
        message = f"{config.task!r} has no preference pairs; use 'arithmetic' or 'files'"
        raise DataError(f"config.data.task: {message}")
    prompts = load_dataset(config, tokenizer, split, seed).prompts
    chosen = _answer_tokens(tokenizer, [prompt.extra_info["answer"] for prompt in prompts])
    salt = f"{name} {seed}".strip()
    wrong = [wrong_answer(prompt.extra_info, salt) for prompt in prompts]
    wrong += [misread_answer(prompt.extra_info, salt) for prompt in prompts]
    answers = zip(chosen * 2, _answer_tokens(tokenizer, wrong), strict=True)
    return [
        PreferencePair(*_with_answers([prompt] * 2, both))
        for prompt, both in zip(prompts * 2, answers, strict=True)
    ]


def labeled_examples(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    seed: int,
    max_tokens: int = 0,
) -> Rows[Example]:
    """Loads answers with a label, desirable or not, for losses on single answers.

    A row of files is one of SFT with the column `label`. In the arithmetic task the answers are
    those of `preference_pairs`, the chosen ones desirable.
    """
    if config.task == "files":
        report = RowReport(split, "sequences")
        make = functools.partial(_labeled_of_row, config, tokenizer, max_tokens, report)
        return _rows_of_files(config, split, make, max_tokens, report)
    pairs = preference_pairs(config, tokenizer, split, seed, max_tokens=max_tokens)
    assert isinstance(pairs, Sequence), "generated pairs are made at the start"
    answers = ((pair.chosen, pair.rejected._replace(desirable=False)) for pair in pairs)
    return list(itertools.chain.from_iterable(answers))


def _labeled_of_row(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    report: RowReport,
    row: Row,
    where: str,
    index: int,
) -> tuple[Example, ...]:
    desirable = desirable_label(row, where, config.row_mapping.columns.get("label", "label"))
    if row.get("images"):
        raise DataError(f"{where}: images are for job='sft' and 'rl'; leave the row out")
    examples = _examples_of_row(config, tokenizer, max_tokens, None, report, row, where, index)
    return tuple(example._replace(desirable=desirable) for example in examples)


def _rows_of_files(
    config: DataConfig, split: Split, make: MakeSequences[T], max_tokens: int, report: RowReport
) -> Rows[T]:
    """Processes every row of a split's files; raises DataError if nothing is left."""
    rule = f"have more tokens than trainer.max_sequence_tokens={max_tokens}, or no answer after"
    rule += " data.long_rows has cut them; raise it"
    if report.noun == "pairs" and config.stream:
        rule += ", or correct the pairs whose two answers are equal"
    if split == "train" and config.stream:
        report.reports_progress = True
        rows = _streamed_rows(config, make, max_tokens, rule)
        for part in streamed_parts(rows):
            part.first(_NUM_FIRST)  # reports wrong columns before any work
        return rows
    index = itertools.count()
    parts = [
        list(
            itertools.chain.from_iterable(
                make(row, where, next(index)) for where, row in read_rows([path])
            )
        )
        for path in split_files(config, split)
    ]
    if not any(parts):
        only = report.only_reason
        raise DataError(f"config.data.{split}_files: all {report.num_rows} rows {only or rule}")
    report.log()
    if split == "train" and config.train_weights:
        return _mixed_rows(config, parts)
    return list(itertools.chain.from_iterable(parts))


def _examples_of_row(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    image_processor: ImagePreprocessor | None,
    report: RowReport,
    row: Row,
    where: str,
    index: int,
) -> tuple[Example, ...]:
    row = example_columns(config, row, where)
    dialogue = sft_dialogue(row, where, config.prompt_column, role_aliases(config.role_aliases))
    checked = {"prompt": dialogue.messages, "images": row.get("images")}
    checked = with_images(checked, image_processor, where)
    dialogue = dialogue._replace(messages=checked["prompt"])
    check_shown(config, tokenizer, dialogue)
    split = dialogue_sequences(tokenizer, dialogue, config.chat_template, config.rewritten_turns)
    examples = []
    for example, num_messages, _ in split.sequences:
        if image_processor is not None:
            images_shown = checked.get("prompt_images", ())
            if num_messages < len(dialogue.messages):  # a prefix has only the first images
                images_shown = images_shown[: _num_images(dialogue.messages[:num_messages])]
            counts, images = image_processor.expand_placeholders(
                example.tokens, images_shown, where
            )
            tokens, mask = (tuple(np.repeat(values, counts).tolist()) for values in example[:2])
            example = Example(tokens, mask, images)
        if max_tokens and config.long_rows != "drop":
            setting = "trainer.max_sequence_tokens"
            refuse_to_cut(example.images, len(example.tokens), max_tokens, setting, where)
        if (
            truncated := truncate_example(example, max_tokens, config.long_rows, where)
        ) is not None:
            examples.append(truncated)
    report.count(
        num_sequences=len(examples),
        num_long=len(split.sequences) - len(examples),
        num_rewritten=split.num_rewritten if config.rewritten_turns == "whole" else 0,
    )
    return tuple(examples)


def _num_images(messages: Sequence[Mapping[str, Any]]) -> int:
    contents = [message.get("content") for message in messages]
    parts = itertools.chain.from_iterable(c for c in contents if isinstance(c, list))
    return sum(part.get("type") == "image" for part in parts)


def check_shown(config: DataConfig, tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue) -> None:
    """Raises DataError if the template would leave out a part of a dialogue."""
    try:
        if config.chat_template and tokenizer.chat_template:
            roles = role_aliases(config.role_aliases).values()
            messages, first, options = dialogue[:3]
            check_dialogue(tokenizer, messages, options, first, roles)
        elif not config.chat_template:
            check_no_template(dialogue.options)
    except DataError as error:
        raise DataError(f"{dialogue.where}: {error}") from error


def pair_of_dialogues(config: DataConfig, row: Row, where: str) -> tuple[Dialogue, Dialogue]:
    """The dialogues of `chosen` and `rejected` of a row; raises DataError if it is no pair."""
    row = pair_columns(config, row, where)
    roles = role_aliases(config.role_aliases)
    both = preference_dialogues(row, where, config.prompt_column, roles)
    refuse_pairs(row, [*both[0].messages, *both[1].messages], where)
    return both


def _pair_of_row(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    report: RowReport,
    row: Row,
    where: str,
    index: int,
) -> tuple[PreferencePair, ...]:
    both = pair_of_dialogues(config, row, where)
    for dialogue in both:
        check_shown(config, tokenizer, dialogue)
    sequences, num_rewritten = [], 0
    for name, dialogue in zip(("chosen", "rejected"), both, strict=True):
        split = dialogue_sequences(
            tokenizer, dialogue, config.chat_template, config.rewritten_turns
        )
        if len(split.sequences) > 1:
            raise DataError(
                f"{where}: {name} has {split.num_rewritten} turns that the chat template writes in"
                " another way once others follow, as Qwen3 drops their thinking, and an answer of a"
                " pair is one sequence; put the earlier turns into the prompt, or set"
                " data.rewritten_turns='whole' to train them as the template writes them"
            )
        sequences.append(split.sequences[0].example)
        num_rewritten += split.num_rewritten
    pair = truncate_pair(PreferencePair(*sequences), max_tokens, config.long_rows, where)
    is_equal = pair is not None and pair.chosen == pair.rejected
    is_kept = pair is not None and not is_equal
    report.count(
        num_sequences=int(is_kept),
        num_long=int(pair is None),
        num_equal=int(is_equal),
        num_rewritten=num_rewritten,
    )
    return (pair,) if pair is not None and is_kept else ()


def _with_answers(prompts: Sequence[Prompt], responses: Sequence[Tokens]) -> list[Example]:
    return [
        Example(
            prompt.tokens + answer,
            (False,) * len(prompt.tokens) + (True,) * len(answer),
            prompt.images,
        )
        for prompt, answer in zip(prompts, responses, strict=True)
    ]


def _answer_tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Tokens]:
    tokens = prompt_tokens(tokenizer, texts, chat_template=True)  # without special tokens
    return [(*answer, tokenizer.eos_token_id) for answer in tokens]
