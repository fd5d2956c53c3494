"""The examples in the docstrings run and print what they say."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import jaxrl_llm.algorithms

MODULES = [module.name for module in pkgutil.iter_modules(jaxrl_llm.algorithms.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(f"jaxrl_llm.algorithms.{name}")
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_has_an_example(name):
    module = importlib.import_module(f"jaxrl_llm.algorithms.{name}")
    own = [
        function
        for key, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not key.startswith("_")
    ]
    assert [function.__name__ for function in own if ">>>" not in (function.__doc__ or "")] == []
