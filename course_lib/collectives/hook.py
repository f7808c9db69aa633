"""Gradients through these collectives: one comm hook for `Bucketed` and for stock DDP.

    model = wrap("bucketed", model, comm_hook=hook, hook_state=all_reduce_ring)

    inner, inter = node_groups()
    two_level = functools.partial(all_reduce_hierarchical, inner=inner, inter=inter)
    ddp_model.register_comm_hook(two_level, hook)

Reducers launch their buckets in one order on every rank, and the queue of this package keeps it.
"""

from __future__ import annotations

from course_lib import record


def hook(state, bucket):  # DDP takes no annotations that are strings, as they are in this file
    """Replace the bucket's gradient by its mean over ranks. `state` is an all-reduce of this package, with its groups
    bound by `functools.partial` where it needs any. Returns a future of the flat gradient."""
    with record.tag(bucket.index()):
        return state(bucket.buffer(), op="mean", async_op=True).get_future()
