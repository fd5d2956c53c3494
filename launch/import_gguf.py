"""Makes a Hugging Face folder of a GGUF file, tokenizer and chat template included.

`python launch/import_gguf.py --file=FILE --out=FOLDER`; needs `pip install 'jaxrl_llm[gguf]'`.
"""

from jaxrl_llm.commands import command_line

if __name__ == "__main__":
    command_line.run("import")
