"""Lists the starter configs."""

import json

from jaxrl_llm.commands.options import ConfigsOptions
from jaxrl_llm.config import starters


def main(options: ConfigsOptions) -> None:
    rows = [starters.Starter.from_file(starters.FOLDER / f"{n}.py") for n in starters.names()]
    if options.json:
        print(json.dumps([vars(row) for row in rows], indent=1))
        return
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.name:<{width}}  {row.task}: {row.machine}")
        if row.memory:
            print(f"{'':<{width}}    planned: {row.memory}")
    print(
        "\njaxrl_llm train --config=NAME --workdir=DIR runs one; jaxrl_llm new NAME FILE writes a"
        " copy to edit."
    )
