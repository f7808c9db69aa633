"""`course plan` on the command line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from course_lib.cli import app
from course_lib.plan import GPUS


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_case_of_the_course() -> None:
    done = run("--model", "7B", "--gpus", "64", "--gpu", "a100-80", "--global-batch", "1024", "--seq", "2048")
    assert done.exit_code == 0
    for said in ("Fastest that fit", "Best for each data-parallel degree", "D = 8: ", "slower: ", "is the largest part",
                 "layouts are impossible", "64 pipeline stages", "Predicted, not measured"):
        assert said in done.output
    assert max(map(len, done.output.splitlines())) <= 80


def lines(*arguments: str) -> list[str]:
    """The rows of the table."""
    said = run(*arguments).output.splitlines()
    first = next(i for i, line in enumerate(said) if line.startswith("layout"))
    return said[first + 1:next(i for i, line in enumerate(said) if line.startswith("TP·PP: "))]


def test_every_sign_of_the_table_is_explained() -> None:
    arguments = ("--model", "llama-13B", "--gpus", "8", "--gpu", "a100-40", "--global-batch", "64")
    said = " ".join(run(*arguments).output.split())
    for words in ("v: parts of the model on each stage", "recompute alternate: backward", "+n: n more v within 1%",
                  "–: nothing", "Assumed: fused attention, sequence parallelism with TP, no dropout", "* tight: fits",
                  "11% more than predicted", "Working is what comes and goes"):
        assert words in said, words
    assert "recompute full:" not in said and "* tight" not in run("--tp", "8", "--pp", "8").output


def test_a_figure_above_all_published_ones_says_so() -> None:
    said = " ".join(run().output.split())
    assert "reach 60% MFU at most" in said and "off by 4% in the median" in said
    assert "MFU at most" not in run("--tp", "8", "--pp", "8").output


def test_variants_of_one_layout_are_one_row() -> None:
    rows = lines("--model", "llama2-70B", "--gpus", "64", "--global-batch", "64")
    assert "v8 b1 +3 " in rows[0]
    found = json.loads(run("--model", "llama2-70B", "--gpus", "64", "--global-batch", "64", "--json").output)
    best = found["layouts"][0]
    assert best["tight"] and {one["tight"] for one in found["layouts"]} == {True, False}
    near = [one for one in found["layouts"] if one["layout"] | {"interleaved": 8} == best["layout"]
            and one["fits"] and one["seconds"]["total"] <= 1.01 * best["seconds"]["total"]]
    assert len(near) == 1 + 3


def test_nothing_is_sharded_over_one_replica() -> None:
    said = run("--dp", "1", "--zero", "1").output
    assert "TP8·PP8 b4             – 1" in said and "ZeRO-1" not in said.split("D = 64")[0]


def test_help_names_every_gpu() -> None:
    said = run("--help").output
    assert all(f" {name}" in said for name in GPUS)


def test_json() -> None:
    found = json.loads(run("--json", "--dp", "8", "--micro-batch", "4").output)
    assert {"format", "model", "gpu", "gpus", "global_batch", "layouts", "impossible"} == set(found)
    one = found["layouts"][0]
    assert one["D"] == 8 and one["N"] == 32 and one["fits"]
    assert "slower: " in one["why"] and "tensor-parallel traffic" in one["why"]  # than the best of all, not of D = 8
    assert one["seconds"]["total"] == pytest.approx(sum(v for k, v in one["seconds"].items() if k != "total"))
    assert one["memory"]["total"] == sum(v for k, v in one["memory"].items() if k != "total")


def test_nothing_fits() -> None:
    done = run("--model", "530B", "--gpus", "8", "--global-batch", "8")
    assert done.exit_code == 0 and "Nothing fits" in done.output and "Fastest" not in done.output


def test_a_gpu_without_published_runs_says_so() -> None:
    assert "No published run on b200" in run("--gpu", "b200", "--gpus", "8", "--micro-batch", "1", "--tp", "8").output


def test_validate() -> None:
    done = run("--validate")
    assert done.exit_code == 0
    for said in ("22B full", "Llama-3 8B 8 GPUs", "Error by source", "GPU-hours", "matmul 0."):
        assert said in done.output
    assert "left out" not in done.output
    found = json.loads(run("--validate", "--json").output)
    assert found["rows"][0]["error"] == pytest.approx(found["rows"][0]["predicted"] / found["rows"][0]["published"] - 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--gpus", "60"), "4 are left over"), (("--model", "8X"), "there is no model '8X'"),
     (("--tp", "3"), "64 GPUs are not a multiple"), (("--global-batch", "0"), "B = 0"), (("--seq", "0"), "rows of 0"),
     (("--network-gb", "0"), "carries nothing"), (("--validate", "--csv", "nowhere.csv"), "nowhere.csv"),
     (("--csv", "nowhere.csv"), "go with --validate"), (("--leave-out",), "go with --validate")],
)  # fmt: skip
def test_refusals_are_one_sentence(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2 and said in done.output and done.output.startswith("course: ")
    assert done.output.count("\n") == 1


@pytest.mark.parametrize(("content", "said"), [
    (b"\xff\xfe\x00", "no table of text"), (b"", "has no rows"), (b"Precision,Model\nbf16\n", "line 2"),
    (b"Precision,Model,SeqLen (T),# GPUs,MicroBatchSize,GradAccum,GPU,Sharding Strategy,Activation Checkpointing,"
     b"MP Mode,Throughput (T/s/GPU)\nbf16,7b,2048,8,1,1,h100_80gb,FULL_SHARD,True,PURE,0\n", "line 2"),
])  # fmt: skip
def test_a_table_that_is_none_is_one_sentence(tmp_path, content: bytes, said: str) -> None:
    (tmp_path / "table.csv").write_bytes(content)
    done = run("--validate", "--csv", str(tmp_path / "table.csv"))
    assert done.exit_code == 2 and said in done.output and done.output.count("\n") == 1
