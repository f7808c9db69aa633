"""`python -m course_lib.train`: train a GPT under any strategy, alone, under torchrun, or on emulated wires."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.resources import files
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from course_lib.job.loop import train
from course_lib.job.options import Options, Refusal, flag
from course_lib.job.progress import interrupted
from course_lib.job.together import Diverged, JobError
from course_lib.launch import PRESETS, Fabric, RankFailed, run
from course_lib.launch.elastic import join
from course_lib.launch.processes import die_with_parent
from course_lib.launch.wire import Wire

STARTED = "TORCHELASTIC_RUN_ID"
"""In the environment of every rank that torchrun started."""
EPILOG = """Under torchrun the ranks are there already, and the network is what it is. Otherwise this command starts
them on this machine, with emulated wires between them. A run that finds a checkpoint in --out goes on from it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SystemExit(self.leave(2, message))

    @staticmethod
    def leave(code: int, message: str) -> int:
        """One sentence, from one rank."""
        if os.environ.get("RANK", "0") == "0":
            print(f"course_lib.train: {message}.", file=sys.stderr, flush=True)
        return code


def parser() -> argparse.ArgumentParser:
    out = _Parser("python -m course_lib.train", description=__doc__, epilog=EPILOG, allow_abbrev=False,
                  formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for one in fields(Options):
        if one.metadata["kind"] is bool:
            out.add_argument(flag(one.name), action="store_true", help=one.metadata["help"])
        else:
            out.add_argument(flag(one.name), type=one.metadata["kind"], default=one.default,
                             help=one.metadata["help"], choices=one.metadata["choices"])
    wires = out.add_argument_group("without torchrun")
    wires.add_argument("--ranks", type=int, help="How many ranks to start (2).")
    wires.add_argument("--fabric", help=f"The wires between them: auto, paced, shaped, loopback, {', '.join(PRESETS)}.")
    wires.add_argument("--nodes", type=int, help="Emulated nodes that the ranks are spread over (1).")
    wires.add_argument("--inter", choices=tuple(PRESETS), help="The wire between nodes.")
    wires.add_argument("--timeout-s", type=float, help="Seconds for everything (86400).")
    out.add_argument("--slurm", action="store_true", help="Print a SLURM script and do nothing else.")
    return out


@record
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the run failed or diverged, 2 it was refused, 130 somebody interrupted it."""
    speaker = parser()
    given = vars(speaker.parse_args(arguments))
    if given.pop("slurm"):
        print(files("course_lib.job").joinpath("slurm.sh").read_text(encoding="utf-8"), end="")
        return 0
    started = STARTED in os.environ
    emulated = {name: given.pop(name) for name in ("ranks", "fabric", "nodes", "inter", "timeout_s")}
    asked = {name: value for name, value in emulated.items() if value is not None}
    try:
        if started and asked:
            raise Refusal(f"{flag(next(iter(asked)))} is for ranks that this command starts itself, and torchrun has "
                          "started them; leave it out, or start without torchrun")
        options = Options(**given)
        ranks = int(os.environ["WORLD_SIZE"]) if started else asked.get("ranks", 2)
        options.laid_out(ranks)
        if started:
            die_with_parent(os.getppid())  # torchrun killed outright would leave its ranks waiting for ever
            join()
            train(options)
            if not isinstance(dist.group.WORLD, Wire):  # a Wire takes itself down; NCCL wants to be asked to
                dist.destroy_process_group()
        else:
            _run(options, ranks, asked)
    except KeyboardInterrupt:
        return speaker.leave(130, interrupted(given["out"]))
    except Diverged as error:
        return speaker.leave(1, str(error))
    except (ValueError, JobError) as error:
        if not isinstance(error, Refusal | JobError) and started:
            raise
        speaker.error(str(error))
    return 0


def _run(options: Options, ranks: int, asked: dict) -> None:
    wires = {name: asked[name] for name in ("nodes", "inter") if name in asked}
    fabric = Fabric(asked.get("fabric", "auto"), **wires)
    try:
        run(train, options, ranks=ranks, fabric=fabric, timeout_s=asked.get("timeout_s", 86400.0))
    except RankFailed as error:
        if isinstance(error.__cause__, JobError):
            raise error.__cause__ from None
        raise


if __name__ == "__main__":
    sys.exit(main())
