"""The verdicts on environment variables: a made-up environment, no GPU, no NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from course_lib.doctor.environment import conf_files, from_files, judge, nearest
from course_lib.doctor.finding import Finding
from course_lib.doctor.remarks import REMARKS
from course_lib.doctor.variables import KNOWN

INTERFACES = ("lo", "eth0", "eth1", "ib0")
ALONE = [  # name, value, verdict, words that must be in what is said
    ("NCCL_NUM_THREADS", "256", "unknown", "NCCL_NTHREADS"),
    ("NCCL_P2P_LEVEL", "PCI", "ignored", "without a word"),
    ("NCCL_P2P_LEVEL", "pix", "ignored", "in this spelling"),
    ("NCCL_P2P_LEVEL", "PIX", "tuning", "known"),
    ("NCCL_P2P_LEVEL", "2", "tuning", "known"),
    ("NCCL_P2P_LEVEL", "LOC", "debug_only", "NCCL_P2P_DISABLE"),
    ("NCCL_P2P_DISABLE", "1", "debug_only", "NVLink"),
    ("NCCL_P2P_DISABLE", "0", "tuning", "known"),
    ("NCCL_SHM_DISABLE", "1", "debug_only", "network"),
    ("NCCL_IB_DISABLE", "1", "debug_only", "IP sockets"),
    ("NCCL_IB_DISABLE", "yes", "ignored", "from 0 to 1"),
    ("NCCL_NTHREADS", "256", "tuning", "each channel"),
    ("NCCL_NTHREADS", "0x80", "tuning", "each channel"),
    ("NCCL_NTHREADS", "100", "ignored", "multiple of 32"),
    ("NCCL_NTHREADS", "1024", "ignored", "from 64 to 512"),
    ("NCCL_NTHREADS", "many", "ignored", "whole number"),
    ("NCCL_MAX_NCHANNELS", "4", "deprecated", "NCCL_MAX_CTAS"),
    ("NCCL_MAX_CTAS", "65", "ignored", "from 1 to 64"),
    ("NCCL_TREE_THRESHOLD", "0", "removed", "2.5"),
    ("NCCL_IB_GDR_LEVEL", "PHB", "removed", "NCCL_NET_GDR_LEVEL"),
    ("NCCL_ALGO", "Ring", "tuning", "trees suit small"),
    ("NCCL_ALGO", "^tree", "tuning", "exclude"),
    ("NCCL_ALGO", "ring,collnetdirect;allreduce:tree", "tuning", "rings large"),
    ("NCCL_ALGO", "hierarchical", "refused", "NVLSTree"),
    ("NCCL_PROTO", "LL128", "tuning", "corrupts"),
    ("NCCL_LAUNCH_MODE", "GROUP", "harms_overlap", "PARALLEL"),
    ("NCCL_LAUNCH_MODE", "PARALLEL", "tuning", "known"),
    ("NCCL_DEBUG", "info", "fine", "known"),
    ("NCCL_DEBUG", "LOUD", "ignored", "WARN"),
    ("NCCL_BUFFSIZE", "8388608", "tuning", "no bucket size"),
    ("NCCL_NET_GDR_LEVEL", "LOC", "debug_only", "GPUDirect"),
    ("NCCL_NET_GDR_LEVEL", "PHB", "tuning", "known"),
    ("NCCL_IB_HCA", "mlx5_1", "fine", "mlx5_10"),
    ("NCCL_CROSS_NIC", "0", "fine", "rails"),
    ("NCCL_CROSS_NIC", "3", "ignored", "from 0 to 2"),
    ("NCCL_SOCKET_IFNAME", "eth", "fine", "NCCL_IB_HCA"),
    ("NCCL_SOCKET_IFNAME", "=eth", "refused", "eth0"),
    ("NCCL_SOCKET_IFNAME", "^docker", "fine", "IP sockets"),
    ("NCCL_SOCKET_IFNAME", "enp", "refused", "ib0"),
    ("GLOO_SOCKET_IFNAME", "eth", "refused", "eth0"),
    ("GLOO_SOCKET_IFNAME", "eth1", "fine", "course's own ranks"),
    ("NCCL_PSK", "0123456789012345678901234567890123", "fine", "not shown"),
    ("NCCL_LL128_NTHREADS", "640", "tuning", "known"),
    ("NCCL_VERSION", "2.27.3-1", "fine", "known"),
    ("NCCL_FASTRAK_NUM_FLOWS", "2", "plugin", "TCPXO"),
    ("NCCL_MADE_UP_BY_A_BLOG", "1", "unknown", "unset"),
    ("nccl_debug", "INFO", "unknown", "NCCL_DEBUG"),
    ("TORCH_NCCL_ENABLE_TIMING", "1", "harms_overlap", "143890"),
    ("TORCH_NCCL_ENABLE_TIMING", "0", "fine", "known"),
    ("TORCH_NCCL_ENABLE_TIMING", "maybe", "refused", "does not start"),
    ("TORCH_NCCL_BLOCKING_WAIT", "True", "harms_overlap", "blocks the host"),
    ("NCCL_BLOCKING_WAIT", "1", "harms_overlap", "blocks the host"),
    ("NCCL_ASYNC_ERROR_HANDLING", "1", "deprecated", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ("TORCH_NCCL_BLOKING_WAIT", "1", "unknown", "TORCH_NCCL_BLOCKING_WAIT"),
    ("NCCL_HIGH_PRIORITY", "1", "unknown", "TORCH_NCCL_HIGH_PRIORITY"),
    ("TORCH_NCCL_HIGH_PRIORITY", "1", "fine", "before compute"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "harms_overlap", "every collective"),
    ("TORCH_DISTRIBUTED_DEBUG", "OFF", "fine", "known"),
    ("TORCH_COMPILE_DEBUG", "1", "unchecked", "not about communication"),
    ("CUDA_LAUNCH_BLOCKING", "1", "harms_overlap", "no overlap at all"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "64", "ignored", "from 1 to 32"),
]


def told(environ: dict[str, str], **options) -> tuple[Finding, ...]:
    return judge(environ, interfaces=INTERFACES, files=(), **options)


@pytest.mark.parametrize(("name", "value", "verdict", "words"), ALONE)
def test_one_variable(name: str, value: str, verdict: str, words: str) -> None:
    (finding,) = told({name: value, "PATH": "/bin"})
    assert finding.data["verdict"] == verdict, finding
    assert words in f"{finding.detail} {finding.remedy} {finding.source}"


@pytest.mark.parametrize(("strategy", "value", "verdict", "words"), [
    ("", "1", "depends", "FSDP2"),
    ("", "8", "fine", "most strategies"),
    ("fsdp2", "1", "harms_overlap", "unset it for fsdp2"),
    ("ddp", "1", "harms_overlap", "one queue"),
    ("fsdp2", "8", "depends", "export CUDA_DEVICE_MAX_CONNECTIONS=32"),
    ("fsdp2", "4", "depends", "fewer than CUDA's own 8"),
    ("fsdp2", "16", "fine", "fsdp2"),
    ("fsdp2", "32", "fine", "fsdp2"),
    ("ddp", "8", "fine", "ddp"),
    ("megatron-tp", "1", "fine", "megatron-tp"),
    ("megatron-tp", "8", "harms_overlap", "launch order"),
])  # fmt: skip
def test_hardware_queues_against_the_strategy(strategy: str, value: str, verdict: str, words: str) -> None:
    (finding,) = told({"CUDA_DEVICE_MAX_CONNECTIONS": value}, strategy=strategy)
    said = f"{finding.detail} {finding.remedy}"
    assert finding.data["verdict"] == verdict
    assert words in said and "from Python after the first CUDA call has no effect" in said


def test_megatron_is_told_when_it_is_not_set_and_others_are_not() -> None:
    assert [f.value for f in told({}, strategy="megatron-tp")] == ["not set"]
    assert told({}, strategy="fsdp2") == told({}) == ()


@pytest.mark.parametrize(("environ", "key", "verdict"), [
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_ENABLE_TIMING": "1"},
     "TORCH_NCCL_ENABLE_TIMING+CUDA_DEVICE_MAX_CONNECTIONS", "harms_overlap"),
    ({"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"}, "NCCL_P2P_DISABLE+NCCL_P2P_LEVEL", "contradiction"),
    ({"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"},
     "NCCL_SOCKET_NTHREADS+NCCL_NSOCKS_PERTHREAD", "contradiction"),
    ({"NCCL_MIN_CTAS": "16", "NCCL_MAX_CTAS": "4"}, "NCCL_MIN_CTAS+NCCL_MAX_CTAS", "contradiction"),
])  # fmt: skip
def test_pairs_that_undo_each_other(environ: dict[str, str], key: str, verdict: str) -> None:
    assert {f.key: f.data["verdict"] for f in told(environ)}[key] == verdict


def test_pairs_that_agree_are_not_mentioned() -> None:
    calm = {"NCCL_MIN_CTAS": "4", "NCCL_MAX_CTAS": "16", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    assert len(told(calm)) == len(calm)


def test_a_key_for_encryption_is_never_shown() -> None:
    key = "0123456789012345678901234567890123"
    assert key not in repr(told({"NCCL_PSK": key}))


def test_only_what_stops_a_lab_is_a_failure() -> None:
    assert {f.level for name, value, *_ in ALONE for f in told({name: value})} == {"ok", "note", "warn"}
    assert [f.level for f in told({"TORCH_DISTRIBUTED_DEBUG": "loud"})] == ["fail"]


def test_files_count_as_set_and_the_environment_wins(tmp_path: Path) -> None:
    conf = tmp_path / "nccl.conf"
    conf.write_text("# ours\nNCCL_P2P_DISABLE=1\nNCCL_SOCKET_IFNAME==eth0\nNCCL_NTHREADS=64\n")
    found = {f.key: f for f in judge({"NCCL_NTHREADS": "128"}, interfaces=INTERFACES, files=(conf, tmp_path / "none"))}
    assert "in a file" in found["NCCL_P2P_DISABLE"].detail
    assert (found["NCCL_SOCKET_IFNAME"].value, found["NCCL_SOCKET_IFNAME"].level) == ("=eth0", "ok")
    assert found["NCCL_NTHREADS"].value == "128" and "in a file" not in found["NCCL_NTHREADS"].detail


def test_which_files_nccl_reads() -> None:
    assert conf_files({"HOME": "/h"})[1] == Path("/h/.nccl.conf")
    assert len(conf_files({})) == 1, "without a home nothing of the working directory is read"
    assert conf_files({"HOME": "/h", "NCCL_CONF_FILE": "/c"})[1] == Path("/c")
    assert from_files(conf_files({"NCCL_CONF_FILE": "/nowhere/at/all"})[1:]) == {}


@pytest.mark.parametrize(("wrong", "right"), [
    ("NCCL_BUFFER_SIZE", "NCCL_BUFFSIZE"), ("NCCL_MAX_CHANNELS", "NCCL_MAX_NCHANNELS"),
    ("NCCL_SOCKET_INTERFACE", "NCCL_SOCKET_IFNAME"), ("NCCL_ENABLE_MONITORING", "TORCH_NCCL_ENABLE_MONITORING"),
    ("GLOO_SOCKET_IFACE", "GLOO_SOCKET_IFNAME"), ("TORCH_DISTRIBUTED_DEBUGG", "TORCH_DISTRIBUTED_DEBUG"),
    ("NCCL_BLOCKING_WAI", "TORCH_NCCL_BLOCKING_WAIT"), ("NCCL_XYZZY", ""),
])  # fmt: skip
def test_the_nearest_right_name(wrong: str, right: str) -> None:
    assert nearest(wrong) == right


def test_every_row_of_the_table_names_its_source() -> None:
    assert all(known.source for known in KNOWN.values())
    assert all(remark.source for remark in REMARKS.values())


def test_every_remark_is_about_a_known_variable_and_a_known_value() -> None:
    for name, remark in REMARKS.items():
        assert name in KNOWN
        rule, spellings = KNOWN[name].rule, (*remark.when, *map(str.upper, remark.when))
        shown = [value for value in spellings if not rule.problem(value)]
        assert shown or not remark.when, f"no value in {remark.when} of {name} is accepted: nobody sees the remark"
