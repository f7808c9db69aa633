"""`course …` on the command line. Each command imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from course_lib import __version__

app = typer.Typer(
    name="course",
    help="Gradient accumulation and communication/computation overlap: the tools of the workbook.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"course {__version__}")
        raise typer.Exit


@app.callback()
def course(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Gradient accumulation and communication/computation overlap: the tools of the workbook."""


@app.command()
def build(
    labs: Annotated[list[str] | None, typer.Argument(help="Lab numbers, for instance: 04 07. Without: all.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; say which labs are not up to date.")] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Also run each solution, quickly, and store it with its outputs.")
    ] = False,
    root: Annotated[Path | None, typer.Option(help="The folder with solutions/ and labs/. Without: found.")] = None,
) -> None:
    """Write labs/NN_topic.ipynb from solutions/NN_topic.py."""
    from course_lib.lab.build import BuildError, build_labs

    if check and run:
        _fail("--check writes nothing and --run stores a notebook: give one of them.", code=2)
    try:
        report = build_labs(labs or [], root=root, check=check, run=run, say=typer.echo)
    except BuildError as error:
        _fail(str(error))
    if not report:
        raise typer.Exit(1)


def _fail(sentence: str, code: int = 1) -> None:
    """One sentence on standard error, no traceback."""
    typer.echo(f"course: {sentence}", err=True)
    raise typer.Exit(code)


def main() -> None:
    """The console script."""
    app(prog_name="course")


if __name__ == "__main__":
    main()
