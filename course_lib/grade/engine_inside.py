"""A papermill engine that never believes a notebook: it runs inside the sandbox and keeps within limits.

A cell has a time limit, the notebook a limit of output counted while it streams, and a cell counts as run only if
its `execution_count` was set. What it reports is evidence for people.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from papermill import execute_notebook
from papermill.engines import Engine, papermill_engines

CELL_BYTES = 200_000
"""Of one cell's output this much is kept; a tenth of the notebook's limit."""


class Client(NotebookClient):
    """A client that counts what a kernel sends, and ends the kernel when it is too much."""

    limit_bytes = 2 * 2**20
    sent_bytes = 0
    cell_bytes = 0
    flooded = False

    def process_message(self, msg: dict, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] not in ("stream", "display_data", "execute_result", "error", "update_display_data"):
            return super().process_message(msg, cell, cell_index)
        size = len(json.dumps(msg["content"], default=str))
        picture = "image/png" in msg["content"].get("data", {})
        self.sent_bytes += size
        self.cell_bytes += 0 if picture else size
        if self.sent_bytes > self.limit_bytes:
            self.flooded = True
            self.kill()
            return None
        if self.cell_bytes > CELL_BYTES and msg["msg_type"] == "stream":
            return None
        return super().process_message(msg, cell, cell_index)

    def kill(self) -> None:
        """End the kernel at once; it may ignore an interrupt."""
        with contextlib.suppress(Exception):
            self.km.provisioner.process.kill()

    def exit_code(self) -> int | None:
        with contextlib.suppress(Exception):
            return self.km.provisioner.process.poll()
        return None


class CourseEngine(Engine):
    """Runs the cells that the plan names, on past errors in exercises and their checks."""

    plan: dict
    report: dict

    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **kwargs: Any) -> None:
        notebook, plan = nb_man.nb, cls.plan
        client = Client(notebook, timeout=plan["cell_s"], startup_timeout=60, kernel_name=kernel_name,
                        resources={"metadata": {"path": plan["folder"]}}, allow_stdin=False)  # fmt: skip
        client.limit_bytes = plan["output_bytes"]
        end = time.monotonic() + plan["notebook_s"]
        with contextlib.suppress(Exception), client.setup_kernel(cleanup_kc=False):
            for index, cell in enumerate(notebook.cells):
                if cell.cell_type != "code" or not cell.source.strip() or cell.get("id") in plan["left_out"]:
                    continue
                if not cls._ran(nb_man, client, index, cell, end):
                    break
            client.kill()

    @classmethod
    def _ran(cls, nb_man: Any, client: Client, index: int, cell: Any, end: float) -> bool:
        """Run a cell; whether the notebook goes on after it."""
        left = end - time.monotonic()
        client.timeout, client.cell_bytes = max(1, round(min(cls.plan["cell_s"], left))), 0
        nb_man.cell_start(cell, index)
        cls.report["last"] = cell.get("id")
        try:
            client.execute_cell(cell, index)
        except CellExecutionError as error:
            nb_man.cell_exception(cell, index, exception=error)
            cls.report["errors"].append([cell.get("id"), f"{error.ename}: {error.evalue}"[:500]])
            if error.ename == "SystemExit":
                cls.report["outcome"] = "early_exit"
                return False
            return cell.get("id") in cls.plan["goes_on_after"]
        except CellTimeoutError as error:
            client.kill()
            nb_man.cell_exception(cell, index, exception=error)
            cls.report["outcome"] = "output_flood" if client.flooded else "timeout"
            return False
        except DeadKernelError as error:
            nb_man.cell_exception(cell, index, exception=error)
            flooded, code = client.flooded, client.exit_code()
            cls.report["outcome"] = "output_flood" if flooded else "early_exit" if code in (0, 1) else "kernel_died"
            cls.report["code"] = code
            if cls.report["outcome"] == "early_exit" and not cell.execution_count:  # the cell before it left
                cls.report["last"] = cls.report["completed"][-1] if cls.report["completed"] else None
            return False
        if client.flooded:
            cls.report["outcome"] = "output_flood"
            return False
        cls.report["completed"].append(cell.get("id"))
        nb_man.cell_complete(cell, cell_index=index)
        return True


def main() -> None:
    """`engine_inside FOLDER`: run `FOLDER/in.ipynb` by `FOLDER/engine.json`, leave `out.ipynb` and `report.json`."""
    folder = Path(sys.argv[1])
    CourseEngine.plan = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
    CourseEngine.report = {"outcome": "ok", "last": None, "completed": [], "errors": [], "code": None}
    papermill_engines.register("course", CourseEngine)
    _write(folder, CourseEngine.report | {"outcome": "kernel_died"})  # if nobody comes to write another
    try:
        execute_notebook(str(folder / "in.ipynb"), str(folder / "out.ipynb"), engine_name="course",
                         parameters=CourseEngine.plan["parameters"], kernel_name="python3", progress_bar=False,
                         log_output=False, cwd=str(folder))  # fmt: skip
    except Exception as error:  # papermill raises for a cell's error once it has saved the notebook
        print(f"{type(error).__name__}: {str(error)[:1000]}")
    finally:
        _write(folder, CourseEngine.report)


def _write(folder: Path, report: dict) -> None:
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
