"""Starting ranks: results, output, every way of ending, and nothing left behind."""

from __future__ import annotations

import asyncio
import glob
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from course_lib.launch import Fabric, RankDied, RankFailed, RunTimeout, context, run
from course_lib.launch.fabric import shaped_works

needs_shaped = pytest.mark.skipif(not shaped_works(), reason="ip and tc do not work in a user namespace here")
FABRICS = ["loopback", "paced", pytest.param("shaped", marks=needs_shaped)]


def rank_sum(x):
    import torch
    import torch.distributed as dist
    t = torch.full((3,), float(dist.get_rank() + x))
    dist.all_reduce(t)
    return dist.get_rank(), t.tolist()


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_results_come_back_in_rank_order(fabric, ranks):
    expected = [float(sum(range(ranks)) + ranks)] * 3
    assert run(rank_sum, 1, ranks=ranks, fabric=fabric) == [(r, expected) for r in range(ranks)]


def test_a_large_result_and_a_local_closure_travel():
    scale = 3

    def big():
        return bytes([scale]) * (5 << 20)

    assert run(big, ranks=2, fabric="loopback") == [b"\x03" * (5 << 20)] * 2


def test_works_inside_a_running_event_loop():
    async def cell():
        return run(rank_sum, 0, ranks=2, fabric="loopback")

    assert asyncio.run(cell())[1][1] == [1.0] * 3


def test_output_is_marked_with_its_rank(capfd):
    run(lambda: print("one\ntwo", flush=True), ranks=2, fabric="loopback")
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == ["[rank 0] one", "[rank 0] two", "[rank 1] one", "[rank 1] two"]


@pytest.mark.timing
def test_output_appears_while_the_rank_runs(capfd):
    seen = []

    def watch():
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and not seen:
            if "early" in capfd.readouterr().out:
                seen.append(time.monotonic())
            time.sleep(0.02)

    def chatty():
        print("early", flush=True)
        time.sleep(1.5)

    thread = threading.Thread(target=watch)
    thread.start()
    run(chatty, ranks=1, fabric="loopback")
    ended = time.monotonic()
    thread.join()
    assert seen and seen[0] < ended - 0.5


def fails_on_one():
    import torch
    import torch.distributed as dist
    if dist.get_rank() == 1:
        raise KeyError("marker")
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("fabric", FABRICS)
def test_an_exception_names_the_rank_and_ends_the_others(fabric):
    with pytest.raises(RankFailed) as caught:
        run(fails_on_one, ranks=3, fabric=fabric, timeout_s=60)
    assert caught.value.rank == 1
    assert "marker" in str(caught.value) and "fails_on_one" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def late_for_the_second():
    import torch
    import torch.distributed as dist
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_stuck_rank_is_named_with_the_collective(fabric):
    with pytest.raises(RunTimeout) as caught:
        run(late_for_the_second, ranks=2, fabric=fabric, timeout_s=5)
    text = str(caught.value)
    assert "rank 0 is still inside collective #2 (all_reduce" in text
    assert "wait for rank 1 to enter collective #2" in text
    assert "in late_for_the_second" in text


def test_a_killed_rank_is_reported_as_dead():
    def end():
        import torch
        import torch.distributed as dist
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankDied, match="rank 0 died without a result: signal 9"):
        run(end, ranks=2, fabric="loopback")


def test_a_dead_rank_is_noticed_though_a_process_it_started_lives_on():
    def end():
        if os.fork() == 0:
            time.sleep(60)
        os._exit(3)

    start = time.monotonic()
    with pytest.raises(RankDied, match="rank 0 died without a result: exit code 3"):
        run(end, ranks=1, fabric="loopback", timeout_s=30)
    assert time.monotonic() - start < 10


def test_a_rank_that_closes_everything_is_ended():
    def close():
        os.closerange(3, 512)
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankDied, match="rank 1"):
        run(lambda: close() if context().rank else None, ranks=2, fabric="loopback", timeout_s=30)
    assert time.monotonic() - start < 15


def test_a_group_of_some_ranks_is_blamed_by_its_own_collectives():
    def stuck():
        import torch
        import torch.distributed as dist
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        rank = dist.get_rank()
        for _ in range(1 + 3 * (rank < 2)):  # one pair is busier than the other, and none is to blame for it
            dist.all_reduce(torch.ones(1), group=pairs[rank // 2])
        if rank == 3:
            time.sleep(60)
        dist.all_reduce(torch.ones(1), group=pairs[rank // 2])

    with pytest.raises(RunTimeout) as caught:
        run(stuck, ranks=4, fabric="loopback", timeout_s=6)
    assert [line for line in str(caught.value).splitlines() if " wait for " in line] == [
        "The others of ranks 2, 3 wait for rank 3 to enter collective #2."]


def test_the_board_names_the_late_rank_of_many_and_hides_no_lane_that_is_stuck():
    from course_lib.launch.board import Board
    board, everybody = Board(256), tuple(range(256))
    for rank in everybody:
        board.write(rank, "0/collective", everybody, 3 - (rank == 255), 2, "all_reduce")
    assert "The others wait for rank 255 to enter collective #3." in board.explain()
    board = Board(1)
    for lane in range(40):
        board.write(0, f"{lane}/collective", None, 1, int(lane != 35), f"lane {lane}")
    assert "is still inside lane 35" in board.explain()


def test_a_receive_that_nobody_serves_names_its_sender():
    def stuck():
        import torch
        import torch.distributed as dist
        if dist.get_rank() == 0:
            for _ in range(3):
                dist.send(torch.ones(1), 1)
            time.sleep(60)
        for _ in range(4):
            dist.recv(torch.ones(1), 0)

    with pytest.raises(RunTimeout) as caught:
        run(stuck, ranks=2, fabric="loopback", timeout_s=5)
    text = str(caught.value)
    assert "rank 1 is still inside recv, 4 bytes from rank 0 (#4)" in text and "wait for" not in text


def test_a_run_that_cannot_have_a_folder_fails_alone(tmp_path):
    script = textwrap.dedent(f"""
        import os
        os.environ["TMPDIR"] = {str(tmp_path / "t")!r}
        os.mkdir(os.environ["TMPDIR"])
        from course_lib.launch import run, RunNotStarted
        print(run(int, ranks=1, fabric="loopback"))
        os.rename(os.environ["TMPDIR"], os.environ["TMPDIR"] + "-away")
        try:
            run(int, ranks=1, fabric="loopback")
        except RunNotStarted as error:
            print("NOT", error)
        os.rename(os.environ["TMPDIR"] + "-away", os.environ["TMPDIR"])
        print(run(int, ranks=1, fabric="loopback"))
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert len(done.stdout.splitlines()) == 3, done.stdout + done.stderr
    first, not_started, last = done.stdout.splitlines()
    assert first == last == "[0]" and "No such file" in not_started, done.stderr


def test_sys_exit_is_an_error_and_not_a_success():
    with pytest.raises(RankFailed, match="SystemExit"):
        run(sys.exit, 0, ranks=1, fabric="loopback")


def _leftovers(mark: str) -> list[str]:
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as f:
                if mark.encode() in f.read():
                    found.append(path)
        except OSError:
            pass
    return found


def spawn_detached(mark):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", mark], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", mark])
        os._exit(0)
    time.sleep(0.2)


linux = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")


@linux
@pytest.mark.parametrize("fabric", FABRICS)
def test_a_detached_grandchild_does_not_outlive_the_run(fabric):
    mark = f"grandchild-{os.getpid()}-{time.time_ns()}"
    run(spawn_detached, mark, ranks=2, fabric=fabric)
    assert _leftovers(mark) == []


@linux
@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_interrupting_or_killing_the_client_leaves_nothing(how, tmp_path):
    mark = f"client-{how}-{time.time_ns()}"
    script = tmp_path / "client.py"
    script.write_text(textwrap.dedent(f"""
        import os, subprocess, sys, time
        from course_lib.launch import run
        def work():
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {mark!r}], start_new_session=True)
            print("ready", os.getpid(), flush=True)
            time.sleep(600)
        try:
            run(work, ranks=2, timeout_s=300)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """))
    # whoever runs the tests in the background ignores SIGINT, and so would the client
    client = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "TMPDIR": str(tmp_path)},
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    pids = [int(client.stdout.readline().split()[-1]) for _ in range(2)]
    assert len(_leftovers(mark)) == 2
    if how == "interrupt":
        client.send_signal(signal.SIGINT)
        assert "interrupted" in client.communicate(timeout=30)[0]
    else:
        client.kill()
        client.communicate(timeout=30)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and (_leftovers(mark) or any(os.path.exists(f"/proc/{p}") for p in pids)
                                           or glob.glob(f"{tmp_path}/course-run-*")):
        time.sleep(0.05)
    assert _leftovers(mark) == []
    assert not any(os.path.exists(f"/proc/{p}") for p in pids)
    assert glob.glob(f"{tmp_path}/course-run-*") == []


def test_two_runs_at_once_do_not_collide():
    results = {}

    def one(key):
        results[key] = run(rank_sum, key, ranks=2, fabric="loopback")

    threads = [threading.Thread(target=one, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert {k: results[k][0][1][0] for k in range(4)} == {k: 2.0 * k + 1 for k in range(4)}


def test_no_scratch_folder_is_left(tmp_path):
    """In a process with a temporary folder of its own: others run at the same time."""
    script = ("import glob, time; from course_lib.launch import run\n"
              "def there(): return len(glob.glob(PLACE))\n"
              "print(run(there, ranks=2, fabric='loopback')); time.sleep(0.2); print(there())")
    done = subprocess.run([sys.executable, "-c", script.replace("PLACE", repr(f"{tmp_path}/course-run-*"))], text=True,
                          env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["[1, 1]", "0"], done.stderr


@pytest.mark.timing
def test_a_warm_start_costs_a_fraction_of_a_cold_one():
    cold = []
    script = "from course_lib.launch import run; run(int, ranks=2, fabric='loopback')"
    for _ in range(2):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", script], check=True)
        cold.append(time.perf_counter() - start)
    warm = []
    for _ in range(5):
        start = time.perf_counter()
        run(int, ranks=2, fabric="loopback")
        warm.append(time.perf_counter() - start)
    assert statistics.median(warm) < 0.2 * min(cold)


@pytest.mark.parametrize("arguments, says", [
    ({"ranks": 0}, "whole number from 1"),
    ({"ranks": 2.5}, "whole number from 1"),
    ({"timeout_s": 0}, "seconds above 0"),
    ({"fabric": "token-ring"}, "choose a kind"),
    ({"fabric": 3}, "must be a name or a Fabric"),
    ({"ranks": 3, "fabric": Fabric(nodes=2)}, "do not fill 2 nodes"),
    ({"ranks": 64, "fabric": "nccl"}, "need 64 GPUs"),
    ({"fabric": Fabric(gbit=5000.0, kind="paced")}, "above what 2 ranks can carry"),
])
def test_impossible_arguments_are_refused_in_a_sentence(arguments, says):
    with pytest.raises(ValueError, match=says):
        run(int, **arguments)


def test_a_rate_on_nccl_is_refused_because_the_hardware_sets_it():
    with pytest.raises(ValueError, match="hardware sets rate"):
        Fabric(gbit=1.0, kind="nccl").resolved(2)


@pytest.mark.parametrize("arguments, says", [
    ({"preset": "Token Ring"}, "unknown fabric preset"),
    ({"gbit": -1}, "not a rate"),
    ({"gbit": float("nan")}, "not a rate"),
    ({"latency_us": -1}, "not a latency"),
    ({"preset": "1GbE", "gbit": 1.0}, "not both"),
    ({"inter": "1GbE"}, "nodes=2 or more"),
    ({"nodes": 0}, "at least one node"),
    ({"kind": "smoke"}, "unknown fabric kind"),
])
def test_an_impossible_fabric_is_refused_when_it_is_made(arguments, says):
    with pytest.raises(ValueError, match=says):
        Fabric(**arguments)


def test_what_cannot_be_shipped_is_named_before_anything_starts():
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot be shipped to the ranks.*lock"):
        run(lambda: lock, ranks=2)


def test_run_inside_a_run_is_refused():
    with pytest.raises(RankFailed, match="start ranks from the notebook or script"):
        run(lambda: run(int, ranks=2), ranks=1, fabric="loopback")


def test_context_outside_a_run_says_where_it_belongs():
    with pytest.raises(RuntimeError, match="inside the function given to run"):
        context()


def test_environment_and_working_directory_follow_the_client(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_TEST_MARK", "yes")
    monkeypatch.chdir(tmp_path)
    assert run(lambda: (os.environ["COURSE_TEST_MARK"], os.getcwd()), ranks=1, fabric="loopback") == [
        ("yes", str(tmp_path))]


def test_under_torchrun_the_group_that_is_there_is_used(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent("""
        import os
        from course_lib.launch import run
        def f(x):
            import torch.distributed as dist
            return dist.get_rank() + x
        got = run(f, 10, ranks=2)
        if os.environ["RANK"] == "0":
            print("GOT", got, flush=True)
        try:
            run(f, 10, ranks=3)
        except ValueError as error:
            print("REFUSED", error, flush=True)
    """))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                           str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_two_machines_under_torchrun_meet_on_the_hosts_own_address(tmp_path):
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent("""
        from course_lib.launch import context, run
        def f():
            import torch, torch.distributed as dist
            t = torch.full((5,), float(dist.get_rank() + 1))
            dist.all_reduce(t)
            return t.tolist(), context().spec.machines
        assert run(f, ranks=2) == [([3.0] * 5, 2)] * 2
    """))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
               "--master-addr=127.0.0.1", f"--master-port={port}"]
    nodes = [subprocess.Popen([*command, f"--node-rank={n}", str(script)], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True) for n in range(2)]
    try:
        said = [node.communicate(timeout=100)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said


def test_a_server_that_cannot_start_is_reported_at_once(monkeypatch):
    from course_lib.launch import RunNotStarted, client

    def refuse():
        raise RunNotStarted("the fork server did not start")

    monkeypatch.setattr(client, "_server", refuse)
    start = time.monotonic()
    with pytest.raises(RunNotStarted):
        run(int, ranks=2, fabric="loopback")
    assert time.monotonic() - start < 5


@pytest.mark.timing
def test_a_short_script_ends_without_waiting_for_modules_to_load():
    script = "import time; from course_lib.launch import run; run(int, ranks=1, fabric='loopback'); time.sleep(0.6); " \
             "print(time.monotonic())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert time.monotonic() - float(done.stdout) < 1.5


@pytest.mark.timing
def test_output_is_live_and_not_lost_without_a_flush():
    script = textwrap.dedent("""
        import os, time
        from course_lib.launch import RankDied, run
        def work():
            print("early")
            time.sleep(1.5)
            print("last words")
            os._exit(3)
        try:
            run(work, ranks=1, fabric="loopback")
        except RankDied as error:
            print(error)
    """)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env)
    first = client.stdout.readline()
    early = time.monotonic()
    rest = client.communicate(timeout=60)[0]
    assert first == "[rank 0] early\n" and "[rank 0] last words" in rest and "exit code 3" in rest
    assert time.monotonic() - early > 1.0


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_rank_killed_inside_a_collective_is_the_one_to_blame(fabric):
    def end():
        import torch
        import torch.distributed as dist
        work = [dist.all_reduce(torch.ones(1 << 20), async_op=True) for _ in range(4)]
        if dist.get_rank() == 1:
            time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        for each in work:
            each.wait()
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankDied, match="rank 1 died without a result: signal 9"):
        run(end, ranks=2, fabric=fabric, timeout_s=30)
