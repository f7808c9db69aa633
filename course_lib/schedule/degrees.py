"""How many ranks share what in a joint run, and one pipeline of it as a schedule numbers its ranks."""

from __future__ import annotations

from typing import NamedTuple

from course_lib.timeline import Timeline


class Degrees(NamedTuple):
    """PP × TP × DP. Rank = (replica · pipeline + stage) · tensor + shard: tensor-parallel ranks are neighbours, and
    the replicas lie farthest apart, on different nodes where there are several."""

    pipeline: int
    tensor: int = 1
    data: int = 1

    @property
    def ranks(self) -> int:
        return self.pipeline * self.tensor * self.data

    def one_pipeline(self, timeline: Timeline, replica: int = 0, shard: int = 0) -> Timeline:
        """The spans of one of the pipelines, with the ranks that a schedule gives them: to draw beside a prediction."""
        stage_of = {(replica * self.pipeline + s) * self.tensor + shard: s for s in range(self.pipeline)}
        return Timeline.of((span._replace(rank=stage_of[span.rank]) for span in timeline if span.rank in stage_of),
                           timeline.provenance)
