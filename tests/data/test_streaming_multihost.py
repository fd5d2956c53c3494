"""Two processes that each read half of the files get the rows that one process gets."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
import quick_compiler

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data import streaming
from jaxrl_llm.data.datasets import load_dataset
from jaxrl_llm.data.prompt_stream import PromptIterator
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.errors import UserError

PROGRAM = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from test_streaming_multihost import drawn
drawn(sys.argv[3], sys.argv[4] + sys.argv[2], int(sys.argv[5]))
"""


def drawn(folder: str, out: str, num_batches: int) -> None:
    """Writes the prompts that a process draws, the pieces that it read, and what stopped it."""
    streaming._LINES_BYTES, streaming._WINDOW_BYTES = 300, 1200
    read, pieces = streaming._piece_content, set()
    streaming._piece_content = lambda piece: pieces.add(piece.start) or read(piece)
    config = DataConfig(
        task="files",
        train_files=(folder,),
        stream=True,
        max_prompt_tokens=9,
        chat_template=False,
    )
    prompts = PromptIterator(load_dataset(config, character_tokenizer(), "train", 0), config, 0)
    found, said = [], ""
    try:
        for _ in range(num_batches):
            found += [
                (p.text, p.index, repr(p.ground_truth)) for p in prompts.next_batch(7).prompts
            ]
    except UserError as error:
        said = str(error)
    finally:
        streaming._piece_content = read
    pathlib.Path(out).write_text(json.dumps([found, said, sorted(pieces), prompts.get_state()]))


@pytest.mark.multihost
@pytest.mark.parametrize("broken", [False, True])
def test_two_processes_draw_what_one_draws(broken, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    # Some are too long, and left out.
    row = {"data_source": "s", "reward_model": {"ground_truth": {"of": [1, None]}}}
    lines = [json.dumps(row | {"prompt": "1" * (i % 8 or 1) + f"{i}="}) for i in range(200)]
    lines[150] = "{" if broken else lines[150]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    paths = [str(pathlib.Path(__file__).parent), *(p for p in sys.path if p)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment["XLA_FLAGS"] = quick_compiler.flags(2)
    # All rows, or less than half of a pass.
    count = 40 if broken else 12
    arguments = [[address, str(rank), folder, tmp_path / "of_", str(count)] for rank in range(2)]
    both = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, *each], env=environment)
        for each in arguments
    ]
    try:
        assert [process.wait(timeout=480) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
    drawn(str(folder), str(tmp_path / "alone"), count)
    alone, first, second = (
        json.loads((tmp_path / name).read_text()) for name in ("alone", "of_0", "of_1")
    )
    assert alone[0] == first[0] == second[0]
    assert broken or len(alone[0]) == 84
    if broken:
        assert "rows.jsonl, row 151: broken JSON" in alone[1]
        assert all("rows.jsonl, row 151: broken JSON" in each[1] for each in (first, second))
    else:
        assert alone[1] == first[1] == second[1] == "" and alone[3] == first[3] == second[3]
        assert {*first[2], *second[2]} == {*alone[2]}
        assert {*first[2]} & {*second[2]} <= {0}  # all look at the first rows before they begin
