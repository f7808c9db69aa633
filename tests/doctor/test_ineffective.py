"""Settings that do nothing beside others, and values that are read otherwise than they look."""

from __future__ import annotations

import pytest

from course_lib.doctor.environment import judge
from course_lib.doctor.finding import Finding
from course_lib.doctor.ineffective import TABLE
from course_lib.doctor.rules import as_number
from course_lib.doctor.variables import KNOWN


def told(**environ: str) -> dict[str, Finding]:
    return {f.key: f for f in judge(environ, interfaces=("lo", "eth0"), files=())}


@pytest.mark.parametrize(("environ", "pair"), [
    ({"NCCL_DEBUG_SUBSYS": "NET"}, "NCCL_DEBUG_SUBSYS+NCCL_DEBUG"),
    ({"NCCL_DEBUG_SUBSYS": "NET", "NCCL_DEBUG": "WARN"}, "NCCL_DEBUG_SUBSYS+NCCL_DEBUG"),
    ({"NCCL_DEBUG_FILE": "/tmp/log"}, "NCCL_DEBUG_FILE+NCCL_DEBUG"),
    ({"NCCL_OOB_NET_IFNAME": "eth0"}, "NCCL_OOB_NET_IFNAME+NCCL_OOB_NET_ENABLE"),
    ({"NCCL_IB_PKEY": "1", "NCCL_IB_PKEY_VALUE": "0x8111"}, "NCCL_IB_PKEY+NCCL_IB_PKEY_VALUE"),
    ({"NCCL_IB_ADDR_RANGE": "10.0.0.0/8", "NCCL_IB_GID_INDEX": "3"}, "NCCL_IB_ADDR_RANGE+NCCL_IB_GID_INDEX"),
    ({"NCCL_MAX_NRINGS": "2", "NCCL_MAX_NCHANNELS": "4"}, "NCCL_MAX_NRINGS+NCCL_MAX_NCHANNELS"),
    ({"NCCL_IB_HCA": "mlx5_0", "NCCL_IB_DISABLE": "1"}, "NCCL_IB_HCA+NCCL_IB_DISABLE"),
    ({"NCCL_IB_HCA": "mlx5_0", "NCCL_NET": "socket"}, "NCCL_IB_HCA+NCCL_NET"),
    ({"NCCL_NET_GDR_READ": "1", "NCCL_NET_GDR_LEVEL": "LOC"}, "NCCL_NET_GDR_READ+NCCL_NET_GDR_LEVEL"),
    ({"NCCL_MNNVL_ENABLE": "1", "NCCL_CUMEM_ENABLE": "0"}, "NCCL_MNNVL_ENABLE+NCCL_CUMEM_ENABLE"),
    ({"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
     "TORCH_NCCL_ASYNC_ERROR_HANDLING+TORCH_NCCL_BLOCKING_WAIT"),
    ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60", "TORCH_NCCL_ENABLE_MONITORING": "0"},
     "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC+TORCH_NCCL_ENABLE_MONITORING"),
    ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "0"},
     "TORCH_NCCL_DUMP_ON_TIMEOUT+TORCH_FR_BUFFER_SIZE"),
    ({"NCCL_MIN_CTAS": "16", "NCCL_MAX_NCHANNELS": "4"}, "NCCL_MIN_CTAS+NCCL_MAX_NCHANNELS"),
    ({"NCCL_GRAPH_STREAM_ORDERING": "0", "NCCL_GRAPH_MIXING_SUPPORT": "1"},
     "NCCL_GRAPH_STREAM_ORDERING+NCCL_GRAPH_MIXING_SUPPORT"),
])  # fmt: skip
def test_what_another_setting_makes_pointless(environ: dict[str, str], pair: str) -> None:
    found = told(**environ)
    assert found[pair].data["verdict"] == "contradiction" and found[pair].level == "warn"


@pytest.mark.parametrize(("environ", "pair"), [
    ({"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}, "NCCL_MULTI_RANK_GPU_ENABLE+NCCL_NVLS_ENABLE"),
    ({"NCCL_ALGO": "NVLS", "NCCL_NVLS_ENABLE": "0"}, "NCCL_ALGO+NCCL_NVLS_ENABLE"),
])  # fmt: skip
def test_pairs_with_which_nothing_starts(environ: dict[str, str], pair: str) -> None:
    assert told(**environ)[pair].data["verdict"] == "refused"


def test_settings_that_work_together_are_left_alone() -> None:
    calm = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^NET", "NCCL_DEBUG_FILE": "/tmp/log", "NCCL_IB_HCA": "mlx5",
            "NCCL_IB_GID_INDEX": "-1", "NCCL_IB_ADDR_FAMILY": "AF_INET6", "NCCL_NET_GDR_READ": "1", "NCCL_NET": "IB",
            "NCCL_NET_GDR_LEVEL": "PHB", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_NCCL_ENABLE_MONITORING": "1", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "60", "NCCL_NVLS_ENABLE": "0",
            "NCCL_ALGO": "Ring,NVLS", "NCCL_IB_DISABLE": "0"}
    assert not [key for key in told(**calm) if "+" in key]


def test_the_table_is_about_variables_that_exist() -> None:
    assert {name for row in TABLE for name in (row.name, row.other)} <= KNOWN.keys()


@pytest.mark.parametrize(("text", "number"), [
    ("1", 1), (" 12 ", 12), ("4MB", 4), ("true", 0), ("0x10", 16), ("010", 8), ("09", 0), ("-3", -3), ("1_000", 1),
    ("", None), ("²", 0)])
def test_numbers_as_c_reads_them(text: str, number: int | None) -> None:
    assert as_number(text) == number


@pytest.mark.parametrize(("name", "value", "verdict", "words"), [
    ("NCCL_BUFFSIZE", "4MB", "ignored", "reads this as 4"),
    ("NCCL_CUMEM_ENABLE", "true", "ignored", "reads this as 0"),
    ("NCCL_IB_DISABLE", "", "ignored", "as good as not set"),
    ("NCCL_IB_TIMEOUT", "0", "debug_only", "no timeout at all"),
    ("NCCL_IB_TIMEOUT", "32", "debug_only", "no timeout at all"),
    ("NCCL_IB_TIMEOUT", "22", "fine", "known"),
    ("NCCL_PSK", "short", "refused", "32 characters"),
    ("NCCL_PSK", "", "fine", "not shown"),
    ("NCCL_CONF_FILE", "~/nccl.conf", "ignored", "no home folder"),
    ("NCCL_CONF_FILE", "/nowhere/nccl.conf", "ignored", "no such file"),
    ("NCCL_DEBUG_FILE", "~/log", "ignored", "no home folder"),
    ("NCCL_DEBUG_SUBSYS", "INIT,NETT", "ignored", "'nett'"),
    ("NCCL_CTA_POLICY", "EFFICIENCY|ZERO", "fine", "known"),
    ("NCCL_CTA_POLICY", "FAST", "ignored", "EFFICIENCY"),
    ("NCCL_PAT_ENABLE", "1", "tuning", "known"),
    ("NCCL_NO_CACHE", "ALL", "tuning", "known"),
    ("NCCL_TIMEOUT", "600", "unknown", "timeout= to init_process_group"),
    ("GLOO_SOCKET_IFNAME", "eth0,eth7", "refused", "eth7"),
    ("GLOO_SOCKET_IFNAME", "lo,eth0", "fine", "course's own ranks"),
    ("NCCL_SOCKET_IFNAME", "eth7,eth0", "fine", "by prefix"),
    ("TORCH_NCCL_USE_COMM_NONBLOCKING", "1", "fine", "known"),
    ("TORCH_NCCL_AVOID_RECORD_STREAMS", "1", "deprecated", "the default by now"),
])  # fmt: skip
def test_values_that_are_read_otherwise_than_they_look(name: str, value: str, verdict: str, words: str) -> None:
    finding = told(**{name: value})[name]
    assert finding.data["verdict"] == verdict, finding
    assert words in f"{finding.detail} {finding.remedy}", finding
