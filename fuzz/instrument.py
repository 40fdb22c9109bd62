"""Coverage of our own modules: every function of them reports to libFuzzer which of its branches ran."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import atheris


def instrument(*modules: ModuleType) -> None:
    """In place, so that what other modules have imported from these is instrumented too.

    atheris's import hook does not find an editable install's modules, which lie elsewhere than their names say.
    """
    for module in modules:
        for function in _functions(vars(module), module.__name__):
            atheris.instrument_func(function)


def _functions(members: dict[str, Any], module: str) -> Iterator[FunctionType]:
    for member in list(members.values()):
        found = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if isinstance(found, FunctionType) and found.__module__ == module:
            yield found
        elif inspect.isclass(member) and member.__module__ == module:
            yield from _functions(dict(vars(member)), module)
