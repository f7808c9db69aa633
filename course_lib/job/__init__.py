"""The training command, `python -m course_lib.train`: one loop for every strategy, that can be killed and go on.

`options` says what can be asked for and refuses what cannot be; `mesh` lays the ranks out; `replicas` and `piped` make
one update; `checkpoint` keeps what a run needs to go on; `lock` keeps a second run out; `loop` puts them together.
"""
