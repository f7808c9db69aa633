"""What a user's factory gives: a module, and how one micro-step of it makes a loss.

A factory takes no argument, is called once on every rank, and returns one of

- `(module, micro_step)`: `micro_step(module)` runs one forward of the module *it is given* and returns the loss;
- `(module, batch)`: the forward itself returns the loss, as `module(**batch)` for a mapping, `module(*batch)` for
  a tuple or list, `module(batch)` otherwise; an output with a field `loss` will do;
- a `module` alone, if it is an emulated model.

Batches are one rank's micro-batch; `torch.distributed.get_rank()` works in the factory.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

import course_lib
from course_lib.launch import context, control_group
from course_lib.train import emulated
from course_lib.tune.profile import ModelError

MicroStep = Callable[[nn.Module], torch.Tensor]

_NOT_THE_USERS = tuple(os.path.realpath(p) + os.sep for p in (
    os.path.dirname(course_lib.__file__), *(sysconfig.get_paths()[k] for k in ("stdlib", "purelib", "platlib"))))


@dataclass(frozen=True)
class Factory:
    """The function that `module:name` or `file.py:name` means; call it on a rank. Raises `ValueError` when the text
    itself cannot be one, and on the rank `ModelError` for what cannot be imported, called or found."""

    spec: str

    def __post_init__(self) -> None:
        source, colon, name = self.spec.rpartition(":")
        if not (colon and source and name):
            raise ValueError(f"--model {self.spec!r}: give module:factory or file.py:factory, for instance "
                             "train.py:make")
        if source.endswith(".py") and not Path(source).is_file():
            raise ValueError(f"--model {self.spec!r}: there is no file {source} here")

    def __call__(self) -> Any:
        source, _, name = self.spec.rpartition(":")
        module = _from_file(Path(source)) if source.endswith(".py") else _from_name(source)
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part, None)
            if found is None:
                raise ModelError(f"{source} has no {name!r}: give the name of a function in it that builds the model")
        if not callable(found):
            raise ModelError(f"{self.spec} is {_kind(found)}, not a function: let a function return it")
        with users_code(f"the factory {self.spec}"):
            return found()


def _from_file(path: Path) -> Any:
    sys.path.insert(0, str(path.resolve().parent))  # as `python path` would
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    with users_code(f"importing {path}"):
        spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    with users_code(f"importing {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not error.name or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise ModelError(f"there is no module {error.name!r} in this folder or installed: check the name, or give "
                             "the file, as in train.py:make") from None


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Turn what the user's own code raises into one sentence with the last line of theirs. Raises `ModelError`."""
    try:
        yield
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        said = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(f"{what} raised {type(error).__name__} on rank {dist.get_rank()}"
                         f"{f': {said}' if said else ''}{_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if not os.path.realpath(f.filename).startswith(_NOT_THE_USERS) and not f.filename.startswith("<")]
    if not frames:
        return ""
    last = frames[-1]
    return f" ({os.path.relpath(last.filename)}, line {last.lineno}, in {last.name}: {last.line})"


def workload(built: Any, micro_step: MicroStep | None = None) -> tuple[nn.Module, MicroStep]:
    """The module and the checked micro-step in what a factory returned. Raises `ModelError` saying what is missing, and
    in the micro-step when a loss is not a finite number. Collective call: every rank must have built the same model."""
    module, step = _parts(built, micro_step)
    if not isinstance(module, nn.Module):
        raise ModelError(f"what the factory returned is {_kind(module)} where a torch.nn.Module was expected: return "
                         "a module, (module, batch) or (module, micro_step)")
    if context().fabric.kind == "nccl" or any(p.device.type != "cpu" for p in module.parameters()):
        raise ModelError("tuning reads the host's clock, which on a GPU sees launches instead of work: keep the model "
                         "on the CPU and name a shaped, paced or loopback fabric")
    _same_everywhere(module)
    return module, _checked(step)


def _parts(built: Any, micro_step: MicroStep | None) -> tuple[Any, MicroStep]:
    if micro_step is not None:
        return built, micro_step
    if isinstance(built, tuple) and len(built) == 2:
        module, second = built
        return module, second if callable(second) and not isinstance(second, torch.Tensor) else _feed(second)
    if isinstance(built, nn.Module) and not isinstance(built, emulated.Emulated):
        raise ModelError("the factory returned a module alone, and nothing says how to feed it: return (module, batch) "
                         "if its forward returns the loss, else (module, micro_step) with micro_step(module) -> loss")
    return built, lambda module: module(torch.ones(4)).square().mean()


def _feed(batch: Any) -> MicroStep:
    def step(module: nn.Module) -> Any:
        if isinstance(batch, Mapping):
            out = module(**batch)
        elif isinstance(batch, tuple | list):
            out = module(*batch)
        else:
            out = module(batch)
        return out["loss"] if isinstance(out, Mapping) and "loss" in out else getattr(out, "loss", out)
    return step


def _checked(step: MicroStep) -> MicroStep:
    def micro_step(module: nn.Module) -> torch.Tensor:
        with users_code("the micro-step"):
            loss = step(module)
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
            raise ModelError(f"what the micro-step returned is {_kind(loss)}: return the loss, one number that depends "
                             "on parameters which require a gradient")
        if not loss.isfinite().all():
            raise ModelError(f"the loss is {loss.item():g} on rank {dist.get_rank()}: mend that first, a step that "
                             "trains nothing is not worth tuning")
        return loss
    return micro_step


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}{'' if value.requires_grad else ' without a gradient'}"
    return f"of type {type(value).__name__}"


def copy_of(module: nn.Module) -> nn.Module:
    """A copy for one variant, tied parameters tied. Raises `ModelError` where the module does not allow it."""
    with users_code("copying the model"):
        return copy.deepcopy(module)


def _same_everywhere(module: nn.Module) -> None:
    if lazy := [n for n, p in module.named_parameters() if is_lazy(p)]:
        raise ModelError(f"{lazy[0]} has no shape yet: run one forward in the factory")
    model = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in module.named_parameters()]
    mine = hashlib.sha256(repr(model).encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, mine, group=control_group())
    if other := [r for r, d in enumerate(digests) if d != digests[0]]:
        raise ModelError(f"rank {other[0]} built another model than rank 0: let batches depend on the rank, never the "
                         "parameters")
