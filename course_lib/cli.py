"""`course …` on the command line. Each command imports what it needs when it runs, so that help is quick."""

from __future__ import annotations

import io
import sys
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


@app.command()
def grade(
    lab: Annotated[str | None, typer.Argument(help="The lab's number, for instance 04.")] = None,
    submissions: Annotated[Path | None, typer.Argument(help="A folder of submissions, or one notebook.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the records go.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many submissions are judged at a time.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Judge only this learner. Can be given again.")] = None,
    regrade: Annotated[bool, typer.Option("--regrade", help="Also judge what the journal has.")] = False,
    seed: Annotated[int | None, typer.Option(help="Draw the same inputs for everybody.")] = None,
    require_isolation: Annotated[
        bool, typer.Option("--require-isolation", help="Refuse to run submissions without a real sandbox.")
    ] = False,
    self_check: Annotated[
        bool, typer.Option("--self-check", help="Judge the course's own solution, stub and planted wrong answers.")
    ] = False,
    notebook: Annotated[
        bool, typer.Option(help="Also run each notebook from top to bottom, for people to look at.")
    ] = True,
) -> None:
    """Judge submissions in a sandbox. Exit code: 0 all graded, 1 a person is needed, 2 usage, 3 environment,
    4 a fault of the grader, 130 interrupted."""
    from course_lib.grade.command import grade_command

    raise typer.Exit(
        grade_command(lab, submissions, out, jobs=jobs, only=only or [], regrade=regrade, seed=seed,
                      require_isolation=require_isolation, self_check=self_check, notebook=notebook)
    )  # fmt: skip


@app.command()
def release(
    folder: Annotated[Path, typer.Argument(help="The folder to make. It must not exist, or be empty.")],
    root: Annotated[Path | None, typer.Option(help="The course's checkout. Without: found.")] = None,
) -> None:
    """Write the learner's tree: labs and course_lib, no solutions, no hidden checks, no planted answers."""
    from course_lib.grade.release import ReleaseError, release_tree

    try:
        count = release_tree(folder, root)
    except ReleaseError as error:
        _fail(str(error))
    typer.echo(f"{folder}: {count} files, nothing hidden in them")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with stable keys.")] = False,
    strategy: Annotated[
        str, typer.Option(help="ddp, fsdp2 or megatron-tp: what CUDA_DEVICE_MAX_CONNECTIONS is judged against.")
    ] = "",
) -> None:
    """Say whether everything that the labs need works here. Exit code 1 if not; takes some ten seconds."""
    import json

    from course_lib.doctor import STRATEGIES, examine, report

    if strategy and strategy not in STRATEGIES:
        _fail(f"there is no strategy {strategy!r}: choose one of {', '.join(STRATEGIES)}.", code=2)
    found = examine(strategy)
    if as_json:
        typer.echo(json.dumps(report.as_json(found), indent=1))
    else:
        report.as_text(found, sys.stdout)
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def status(
    folder: Annotated[Path | None, typer.Argument(help="The folder with your labs. Without: this one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with stable keys.")] = False,
) -> None:
    """Say where you stand in every lab, from your own notebooks and records. Exit code 1 if there are none."""
    import json

    from course_lib.lab import status as standing
    from course_lib.lab import status_text

    try:
        found = standing.status(folder)
    except standing.NoSuchFolder as error:
        _fail(f"{error}.", code=2)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=1))
    elif found.found:
        status_text.as_text(found, sys.stdout)
    else:
        _fail(status_text.nothing(found))
    if not found.found:
        raise typer.Exit(1)


@app.command()
def trace(
    files: Annotated[list[Path], typer.Argument(help="Traces: .json, .json.gz, .zip or folders, one file a rank.")],
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs; times in nanoseconds.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with pictures here.")] = None,
    cpu: Annotated[
        str | None, typer.Option(help="CPU compute: leaf (operators that call no other) or outer (with all they call).")
    ] = None,
    unprofiled_ms: Annotated[float | None, typer.Option(help="The step time without profiler, in ms.")] = None,
) -> None:
    """Say what communication cost in profiler traces, why, and what to do next."""
    from course_lib.trace.command import run
    from course_lib.trace.note import TraceError

    if cpu not in (None, "leaf", "outer"):
        _fail(f"--cpu is leaf or outer, not {cpu}.", code=2)
    if unprofiled_ms is not None and not 0 < unprofiled_ms < float("inf"):
        _fail(f"--unprofiled-ms {unprofiled_ms:g}: give the time of a step in ms, above 0.", code=2)
    try:
        run(files, step=step, as_json=as_json, html=html, cpu=cpu, unprofiled_ms=unprofiled_ms, write=typer.echo)
    except (TraceError, OSError) as error:
        _fail(str(error))


@app.command()
def tune(
    model: Annotated[
        str, typer.Option(help="module:factory or file.py:factory; the factory takes nothing and returns (module, "
                          "micro_step), where micro_step(module) runs one forward and returns the loss, or (module, "
                          "batch) if the forward itself returns it. It is called on every rank.")
    ],
    ranks: Annotated[int, typer.Option(help="How many ranks to start.")] = 2,
    fabric: Annotated[str, typer.Option(help="The wire: 1GbE, 10GbE, 25GbE, paced, shaped, loopback, …")] = "1GbE",
    micro_steps: Annotated[
        int | None, typer.Option(help="N: micro-steps of one update; only the last communicates. Without: 1.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="B: rows of one update over all ranks; N is then B / (b·ranks).")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="b: rows of one micro-step on a rank, those that the factory feeds.")
    ] = None,
    target_caps: Annotated[str, typer.Option(help="Bucket sizes to consider, in MB.")] = "1,2,4,8,16,25,50,100",
    candidates: Annotated[int, typer.Option(help="How many layouts to measure at most.")] = 4,
    repeats: Annotated[int, typer.Option(help="How often each of them is measured, in alternation.")] = 9,
    timeout: Annotated[float, typer.Option(help="Seconds for everything.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with stable keys.")] = False,
    figure: Annotated[Path | None, typer.Option(help="Also draw step time over bucket size here (.png).")] = None,
) -> None:
    """Choose the bucket size of your own model: predict all from one run, measure the few that could be best.
    Exit code: 0 done, 1 the run failed, 2 the input cannot be."""
    from course_lib.tune.command import RunFailure, accumulation, tune_command

    try:
        tune_command(model, ranks=ranks, fabric=fabric,
                     micro_steps=accumulation(micro_steps, global_batch, micro_batch, ranks), caps=target_caps,
                     candidates=candidates, repeats=repeats, timeout_s=timeout, as_json=as_json, figure=figure,
                     write=typer.echo)
    except ValueError as error:
        _fail(f"{error}.", code=2)
    except (RunFailure, OSError) as error:
        _fail(f"{error}.")


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="A preset (7B, llama3-8B, 175B, …) or layers=32,width=4096,…")] = "7B",
    gpus: Annotated[int, typer.Option(help="How many GPUs.")] = 64,
    gpu: Annotated[str, typer.Option(help="a100-40, a100-80, h100, h100-96, h200 or b200.")] = "a100-80",
    global_batch: Annotated[int, typer.Option(help="B: rows of one update, over all GPUs.")] = 1024,
    seq: Annotated[int | None, typer.Option(help="Tokens of a row. Without: the model's.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="b: only this micro-batch.")] = None,
    tp: Annotated[int | None, typer.Option(help="Only this tensor-parallel degree.")] = None,
    pp: Annotated[int | None, typer.Option(help="Only this number of pipeline stages.")] = None,
    dp: Annotated[int | None, typer.Option(help="Only this data-parallel degree.")] = None,
    zero: Annotated[int | None, typer.Option(help="Only this ZeRO stage.")] = None,
    node: Annotated[int, typer.Option(help="GPUs in a node.")] = 8,
    nvlink_gb: Annotated[float | None, typer.Option(help="GB/s of a GPU inside its node. Without: the GPU's.")] = None,
    network_gb: Annotated[float | None, typer.Option(help="GB/s of a GPU between nodes.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many layouts are shown.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with every layout.")] = False,
    validate: Annotated[bool, typer.Option("--validate", help="Compare with published runs instead.")] = False,
    csv: Annotated[Path | None, typer.Option(help="With --validate: also the rows of a llm-foundry table.")] = None,
    leave_out: Annotated[bool, typer.Option("--leave-out", help="With --validate: fit without each row.")] = False,
) -> None:
    """Say how to lay a training run out over GPUs: memory, step time, and why. Predicted from formulas."""
    from course_lib import plan as planner
    from course_lib.plan import command
    from course_lib.plan.search import search

    if not validate and (csv is not None or leave_out):
        _fail("--csv and --leave-out go with --validate.", code=2)
    try:
        if validate:
            command.validate(csv, leave_out, as_json)
            return
        shape = planner.model(model, seq)
        cluster = planner.cluster(gpu, gpus, node, nvlink_gb=nvlink_gb, network_gb=network_gb)
        limits = {"micro_batch": micro_batch, "tensor": tp, "pipeline": pp, "data": dp, "stage": zero}
        found = search(shape, cluster, global_batch, **limits)
        limited = any(limit is not None for limit in limits.values())
        best = (search(shape, cluster, global_batch) if limited else found).best
    except (planner.Impossible, OSError) as error:
        _fail(f"{error}.", code=2)
    if as_json:
        typer.echo(command.as_json(found, shape, cluster, global_batch, best))
    else:
        command.show(found, shape, cluster, global_batch, top, best)


def _fail(sentence: str, code: int = 1) -> None:
    """One sentence on standard error, no traceback."""
    typer.echo(f"course: {sentence}", err=True)
    raise typer.Exit(code)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        # Names of files and values of variables may hold anything; a terminal's encoding must not end the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="course")


if __name__ == "__main__":
    main()
