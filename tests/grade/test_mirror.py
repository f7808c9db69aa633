"""Values cross as plain JSON; tensors stay the same memory on both sides."""

from __future__ import annotations

import io
import socket

import pytest
import torch

from course_lib.grade.channel import BadMessage, Channel, Gone, Late
from course_lib.grade.codec import Codec
from course_lib.grade.mirror import Mirror


def _pair() -> tuple[Mirror, Mirror]:
    return Mirror("g", holds=False), Mirror("s", holds=True)


def _codec() -> Codec:
    return Codec(Mirror("s", holds=True), lambda v: None, lambda v: {"near": 0, "kind": "object"}, lambda d: "far", int)


def test_views_and_gradients_keep_sharing_memory() -> None:
    here, there = _pair()
    flat, param = torch.arange(4.0), torch.nn.Parameter(torch.zeros(2))
    view = flat[1:3]
    described = [here.describe(t) for t in (flat, view, param)]
    there.apply(here.changes())
    far_flat, far_view, far_param = (there.tensor(d) for d in described)
    param.grad = torch.ones(2)
    there.apply(here.changes())
    far_view.mul_(10)
    far_param.grad = far_flat[:2]
    version = flat._version
    here.apply(there.changes())
    assert flat.tolist() == [0, 10, 20, 3]
    assert flat._version > version
    assert param.grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_what_the_grader_lets_go_is_dropped_on_the_other_side() -> None:
    here, there = _pair()
    tensor = torch.zeros(3)
    here.describe(tensor)
    there.apply(here.changes())
    del tensor
    there.apply(here.changes())
    assert not there._roots
    assert not here._roots


def test_empty_tensors_have_a_shape_and_a_kind() -> None:
    here, there = _pair()
    for tensor in (torch.zeros(3)[3:], torch.zeros(0, 4, dtype=torch.int64)):
        far = there.tensor(here.describe(tensor))
        assert (far.shape, far.dtype) == (tensor.shape, tensor.dtype)
    for described in ({"k": "float32", "s": [2]}, {"k": "object", "s": [0]}, {"k": "float32", "s": [0, 2**40]}):
        with pytest.raises(BadMessage):
            there.tensor(described)


def test_loaded_tensors_share_memory_that_none_of_them_has_whole() -> None:
    here, there = _pair()
    torch.save(list(torch.arange(4.0).split(2)), file := io.BytesIO())
    file.seek(0)
    near = torch.load(file)
    assert [t._base for t in near] == [None, None]
    described = [here.describe(t) for t in near]
    there.apply(here.changes())
    far = [there.tensor(d) for d in described]
    assert far[0].untyped_storage().data_ptr() == far[1].untyped_storage().data_ptr()
    near[1].add_(10)
    there.apply(here.changes())
    far[0].zero_()
    here.apply(there.changes())
    assert [t.tolist() for t in far] == [t.tolist() for t in near] == [[0, 0], [12, 13]]


def test_what_is_written_into_a_tensor_and_not_kept_is_told_before_it_is_dropped() -> None:
    here, there = _pair()
    theirs = torch.ones(2)
    described = there.describe(theirs)
    here.apply(there.changes())
    here.tensor(described).mul_(5)
    there.apply(here.changes())
    assert theirs.tolist() == [5, 5]
    assert not here._roots and not there._roots


def test_memory_under_another_type_is_refused() -> None:
    here, _ = _pair()
    tensor = torch.zeros(2)
    here.describe(tensor)
    with pytest.raises(BadMessage, match="clone it before"):
        here.describe(tensor.view(torch.int32))


@pytest.mark.parametrize("changes", [
    {"memory": {"g1": ["float32", ["1"]]}}, {"memory": {"g1": ["object", [1]]}}, {"grads": {"p": {"m": "nowhere"}}},
    {"memory": [1]}, {"memory": {"g1": ["float32", [1.0] * 100_000]}},
])  # fmt: skip
def test_tensors_that_cannot_be_are_refused(changes: dict) -> None:
    here, _ = _pair()
    param = torch.nn.Parameter(torch.zeros(1))
    here.describe(param)
    changes = {k: ({here._names[id(param)]: v["p"]} if isinstance(v, dict) and "p" in v else v)
               for k, v in changes.items()}  # fmt: skip
    with pytest.raises(BadMessage):
        here.apply(changes)


@pytest.mark.parametrize("value", [
    None, True, 3, 2**70, 1.5, "ä", [1, (2, 3)], {1: [2]}, {(1, 2): "x"}, [[]], {"t": 1, "near": 2},
])  # fmt: skip
def test_plain_values_come_back_as_they_went(value: object) -> None:
    codec = _codec()
    back = codec.decode(codec.encode(value))
    assert back == value
    assert type(back) is type(value)


def test_objects_arrive_as_numbers_or_not_at_all() -> None:
    class Larger(int):
        def __gt__(self, other: object) -> bool:
            return True

    codec = _codec()
    assert type(codec.decode(codec.encode([Larger(3)]))[0]) is int
    loop: list = []
    loop.append(loop)
    with pytest.raises(BadMessage, match="nested"):
        codec.encode(loop)


@pytest.mark.parametrize("value", [{"x": 1, "y": 2}, {"q": [1]}, {"t": 3}, {"d": [[1]]}, {"d": [[[1], 2]]}])
def test_values_of_unknown_form_are_refused(value: object) -> None:
    with pytest.raises(BadMessage):
        _codec().decode(value)


def test_a_channel_tells_long_bad_late_and_gone_apart() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.sendall(b"\x02\0\0\0[]")
    with pytest.raises(BadMessage, match="no object"):
        channel.receive()
    channel.deadline = 0.0
    with pytest.raises(Late):
        channel.receive()
    channel.deadline = None
    theirs.sendall(b"\xff\xff\xff\x7f")
    with pytest.raises(BadMessage, match="MB"):
        channel.receive()
    theirs.close()
    channel = Channel(ours)
    with pytest.raises(Gone):
        channel.receive()
