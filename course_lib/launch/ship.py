"""Ship a function to the ranks by value, with the source lines that its tracebacks will quote."""

from __future__ import annotations

import io
import linecache
import os
import pickle
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import _code_reduce

_ANONYMOUS = "<dynamic-code>"


class _Shipper(cloudpickle.Pickler):
    """cloudpickle drops the file name of what it ships by value; a learner needs it in a traceback."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.files: set[str] = set()

    def reducer_override(self, obj: Any):
        if isinstance(obj, CodeType):
            make, args = _code_reduce(obj)
            self.files.add(obj.co_filename)
            return make, tuple(obj.co_filename if isinstance(a, str) and a == _ANONYMOUS else a for a in args)
        return super().reducer_override(obj)


def pack(fn: Callable, args: tuple) -> bytes:
    """`fn` and `args` as bytes. Raises `ValueError` saying what cannot travel and what to do."""
    body = io.BytesIO()
    shipper = _Shipper(body)
    try:
        shipper.dump((fn, args))
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise ValueError(f"{name} cannot be shipped to the ranks: {error}. Create such objects (locks, open files, "
                         "generators, process groups) inside the function instead of capturing them") from error
    cells = {f: linecache.getlines(f) for f in shipper.files if not os.path.exists(f)}
    return pickle.dumps((cells, body.getvalue()))


def unpack(payload: bytes) -> tuple[Callable, tuple]:
    """What `pack` packed; notebook cells are made known to tracebacks."""
    cells, body = pickle.loads(payload)
    for name, lines in cells.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return pickle.loads(body)
