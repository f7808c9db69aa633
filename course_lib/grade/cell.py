"""Running a learner's cell outside a notebook as a notebook would: with magics, `display`, and `await`."""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import linecache
from types import CodeType
from typing import Any


def new_namespace() -> dict[str, Any]:
    """What cells find without an import."""
    namespace: dict[str, Any] = {"__name__": "__main__", "display": _display}
    namespace["get_ipython"] = functools.lru_cache(lambda: _shell(namespace))
    return namespace


def run_cell(name: str, source: str, namespace: dict[str, Any]) -> None:
    """Run a cell; `name` is its file in tracebacks. Raises what the cell raises."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    code = _compiled(_plain(source), name)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, namespace))
    else:
        exec(code, namespace)


def _compiled(source: str, name: str) -> CodeType:
    """Without the `from __future__` of this file."""
    return compile(source, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def _plain(source: str) -> str:
    """What IPython makes of a cell before Python sees it: magics become calls, nothing else changes."""
    try:
        _compiled(source, "<cell>")
        return source
    except SyntaxError:
        from IPython.core.inputtransformer2 import TransformerManager

        return TransformerManager().transform_cell(source)


def _display(*values: Any, **options: Any) -> None:
    from IPython.display import display

    display(*values, **options)


def _shell(namespace: dict[str, Any]) -> Any:
    """What magics become calls of. Made for the first one: loading IPython takes a while."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Shell(InteractiveShell):
        """Without what a terminal or a window would be needed for."""

        system = InteractiveShell.system_raw

        def enable_gui(self, gui: str | None = None) -> None:
            pass

    return Shell(user_ns=namespace, config=Config(HistoryManager={"enabled": False}))
