"""Any Chrome trace of PyTorch's profiler -> `Timeline`; classification; diagnosis. No torch.

>>> from course_lib import overlap, trace
>>> print(overlap.report(trace.read("profile/")).sentence)           # doctest: +SKIP

`read` gives the timeline alone, `load` also the notes and facts of every file; `measure` is the report of what was
loaded, `diagnose` says what to do next.
"""

from course_lib.trace.diagnose import Finding, diagnose
from course_lib.trace.measure import measure, waits
from course_lib.trace.note import Note, TraceError
from course_lib.trace.reader import RankTrace, Trace, load, read

__all__ = ["Finding", "Note", "RankTrace", "Trace", "TraceError", "diagnose", "load", "measure", "read", "waits"]
