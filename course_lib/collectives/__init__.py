"""All-reduce, reduce-scatter and all-gather written with sends and receives, on CPU tensors, in place.

They run on any group of a run's ranks and send real bytes through its Wire. One rule: all ranks issue their
collectives in the same order, whatever the groups.
"""

from course_lib.collectives.doubling import all_reduce_doubling
from course_lib.collectives.hierarchical import all_reduce_hierarchical, node_groups
from course_lib.collectives.hook import hook
from course_lib.collectives.ring import all_gather_ring, all_reduce_ring, reduce_scatter_ring, segments

__all__ = ["all_gather_ring", "all_reduce_doubling", "all_reduce_hierarchical", "all_reduce_ring", "hook",
           "node_groups", "reduce_scatter_ring", "segments"]
