"""Ranks that start again meet in a store that remembers the dead."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from course_lib.launch.meeting import meet


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(store: dist.TCPStore) -> dist.Store:
    return dist.TCPStore("127.0.0.1", store.port, is_master=False)


class Meeting:
    """Three ranks, each a thread with a connection of its own."""

    def __init__(self, store: dist.TCPStore) -> None:
        self.store, self.found, self.threads = store, {}, []

    def start(self, *ranks: int) -> Meeting:
        def go(rank: int) -> None:
            self.found[rank] = meet(client(self.store), rank, 3, 20)

        new = [threading.Thread(target=go, args=(rank,)) for rank in ranks]
        self.threads += new
        for thread in new:
            thread.start()
        return self

    def end(self) -> dict[int, dist.Store]:
        for thread in self.threads:
            thread.join()
        return self.found


def test_ranks_share_a_part_and_the_next_start_gets_another(store: dist.TCPStore) -> None:
    first = Meeting(store).start(0, 1, 2).end()
    first[0].set("address", "here")
    assert sorted(first) == [0, 1, 2] and all(part.get("address") == b"here" for part in first.values())
    second = Meeting(store).start(2, 1, 0).end()
    assert sorted(second) == [0, 1, 2] and not any(part.check(["address"]) for part in second.values())


def test_what_a_dead_rank_left_does_not_count_as_its_coming(store: dist.TCPStore) -> None:
    Meeting(store).start(0, 1, 2).end()
    meeting = Meeting(store).start(0, 2)
    time.sleep(0.3)
    assert 0 not in meeting.found
    assert sorted(meeting.start(1).end()) == [0, 1, 2]


def test_who_does_not_come_is_named(store: dist.TCPStore) -> None:
    with pytest.raises(TimeoutError, match=r"waited 0\.2 s for ranks \[1, 2\]"):
        meet(client(store), 0, 3, 0.2)
    with pytest.raises(TimeoutError, match=r"rank 1 waited 0\.2 s for rank 0"):
        meet(client(store), 1, 3, 0.2)
