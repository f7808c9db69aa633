"""Tensor and sequence parallelism: layers cut over the ranks of a process group.

    model = parallel_gpt(GPT(), group, sequence_parallel=True, chunks=2)
    loss, count = parallel_next_byte_loss(model, batch)
    (loss / count).backward()
    finish_replicated_gradients(model)
    optimizer.step()

Every layer is built from the unsharded one, which all ranks of the group must hold alike:
`ColumnParallel.shard(linear, group)`. A model cut by PyTorch's own DTensor, for comparison, is in `twin`.
"""

from course_lib.tensor.chunked import gather_linear, linear_scatter
from course_lib.tensor.gpt import parallel_attention, parallel_gpt, parallel_mlp, parallel_next_byte_loss
from course_lib.tensor.gradients import finish_replicated_gradients, global_norm, sequence_parallel
from course_lib.tensor.linear import ColumnParallel, RowParallel
from course_lib.tensor.random import ShardedDropout, refuse_different_random, sharded_random
from course_lib.tensor.regions import all_gather, all_reduce, collect, copy, reduce_scatter, split
from course_lib.tensor.shard import Shard, full_state
from course_lib.tensor.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy

__all__ = ["ColumnParallel", "RowParallel", "Shard", "ShardedDropout", "VocabParallelEmbedding", "all_gather",
           "all_reduce", "collect", "copy", "finish_replicated_gradients", "full_state", "gather_linear", "global_norm",
           "linear_scatter", "parallel_attention", "parallel_gpt", "parallel_mlp", "parallel_next_byte_loss",
           "reduce_scatter", "refuse_different_random", "sequence_parallel", "sharded_random", "split",
           "vocab_parallel_cross_entropy"]
