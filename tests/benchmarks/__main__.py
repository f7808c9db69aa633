"""Run benchmarks and write `bench.json`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.benchmarks import (  # noqa: F401  they register themselves
    bench_collectives,
    bench_compress,
    bench_compression_pays,
    bench_joint,
    bench_launch,
    bench_overlap,
    bench_pipeline,
    bench_plan,
    bench_recorder,
    bench_sharded,
    bench_tensor,
    bench_tune,
)
from tests.benchmarks.harness import BENCHMARKS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    parser.add_argument("--only", choices=sorted(BENCHMARKS), help="run one benchmark and keep the others' results")
    args = parser.parse_args()
    kept = json.loads(args.out.read_text()) if args.only and args.out.exists() else []
    chosen = [args.only] if args.only else list(BENCHMARKS)
    rows = [r for r in kept if r["command"].rpartition("ONLY=")[2] not in chosen]
    for name in chosen:
        start = time.perf_counter()
        print(f"{name} …", flush=True)
        for figure in BENCHMARKS[name]():
            row = replace(figure, command=f"make bench ONLY={name}").row()
            rows.append(row)
            mark = "reached" if row["reached"] else "NOT reached"
            print(f"  {row['name']}: {row['value']:.4g} ± {row['spread']:.2g} {row['unit']} "
                  f"(goal {row['direction']} {row['goal']:g}: {mark}) {row['note']}", flush=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"  {time.perf_counter() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
