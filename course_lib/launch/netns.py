"""The shaped fabric: a network namespace for each rank, and wires whose rate the kernel keeps.

Every rank has a veth to its node's bridge, every node an uplink to the core bridge; each direction
of each wire has its own token bucket. It needs no root: the namespaces belong to a user namespace
in which this user is root. They are nameless and vanish with the processes in them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from course_lib.launch.processes import CLONE_NEWNET, become_root_of_new_user_namespace, drop_capabilities, unshare

BURST = "72kb"  # just above one 64 KiB packet: more hides small messages, less splits packets
CONGESTION_CONTROL = "reno"
INTERFACE = "eth0"
_TBF = "root tbf rate {rate:.0f}kbit burst " + BURST + " latency 200ms"


@dataclass(frozen=True)
class Wires:
    """Rates in Gbit/s and the node of each rank."""

    node_of: tuple[int, ...]
    gbit: float
    inter_gbit: float


def _tool(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        raise OSError(f"{name} is not installed (Debian and Ubuntu: package iproute2)")
    return path


def _batch(tool: str, lines: list[str]) -> None:
    done = subprocess.run([_tool(tool), "-batch", "-"], input="\n".join(lines) + "\n", text=True,
                          capture_output=True, timeout=20)
    if done.returncode:
        raise OSError(f"{tool} refused: {done.stderr.strip() or done.stdout.strip()}")


def _tbf(device: str, gbit: float) -> str:
    return f"qdisc add dev {device} " + _TBF.format(rate=gbit * 1e6)


def make_switch(wires: Wires) -> None:
    """In a fresh user and network namespace: a bridge for each node, joined by shaped uplinks."""
    become_root_of_new_user_namespace(CLONE_NEWNET)
    nodes = sorted(set(wires.node_of))
    links, shapes = ["link set lo up"], []
    for node in nodes:
        links += [f"link add br{node} type bridge", f"link set br{node} up"]
    if len(nodes) > 1:
        links += ["link add core type bridge", "link set core up"]
        for node in nodes:
            links += [f"link add up{node} type veth peer name down{node}",
                      f"link set up{node} master br{node} up", f"link set down{node} master core up"]
            shapes += [_tbf(f"up{node}", wires.inter_gbit), _tbf(f"down{node}", wires.inter_gbit)]
    _batch("ip", links)
    if shapes:
        _batch("tc", shapes)


def plug_in(wires: Wires, pids: list[int]) -> None:
    """From the switch: a shaped wire to each rank. Rank r is process `pids[r]`, which has called `step_out`."""
    links, shapes = [], []
    for rank, pid in enumerate(pids):
        links += [f"link add v{rank} type veth peer name {INTERFACE} netns {pid}",
                  f"link set v{rank} master br{wires.node_of[rank]} up"]
        shapes.append(_tbf(f"v{rank}", wires.gbit))
    _batch("ip", links)
    _batch("tc", shapes)


def step_out() -> None:
    """In a rank: leave the switch for a network namespace of its own."""
    unshare(CLONE_NEWNET)


def bring_up(wires: Wires, rank: int) -> None:
    """In a rank, once plugged in: address, rate, congestion control. Then every capability is given
    up, so that no training code can loosen its own wire."""
    _batch("ip", ["link set lo up", f"addr add 10.77.{rank // 250}.{rank % 250 + 1}/16 dev {INTERFACE}",
                  f"link set {INTERFACE} up"])
    _batch("tc", [_tbf(INTERFACE, wires.gbit)])
    with open("/proc/sys/net/ipv4/tcp_congestion_control", "w") as f:
        f.write(CONGESTION_CONTROL)
    drop_capabilities()


def kernel_bytes() -> tuple[int, int]:
    """(received, sent) bytes of this rank's wire since it was made, counted by the kernel."""
    with open("/proc/self/net/dev") as f:
        for line in f:
            name, _, counters = line.partition(":")
            if name.strip() == INTERFACE:
                fields = counters.split()
                return int(fields[0]), int(fields[8])
    raise OSError(f"this rank has no interface {INTERFACE}: only a shaped fabric has kernel counters")


def trial() -> None:
    """Build a two-rank switch and tear it down. Raises `OSError` where that is not allowed."""
    wires = Wires(node_of=(0,), gbit=1.0, inter_gbit=1.0)
    make_switch(wires)
    ready_r, ready_w = os.pipe()
    go_r, go_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            step_out()
            os.write(ready_w, b"r")
            os.read(go_r, 1)
            bring_up(wires, 0)
            os._exit(0)
        except BaseException:
            os._exit(1)
    os.close(ready_w)
    os.read(ready_r, 1)
    plug_in(wires, [pid])
    os.write(go_w, b"g")
    if os.waitpid(pid, 0)[1] != 0:
        raise OSError("a rank could not bring its wire up")
