"""The exercises, a module or package `labNN` for each lab. What they know of is in `course_lib.lab.model`."""
