"""The pictures and sliders that belong to one lab or a few; what every lab uses is in `course_lib.show`."""
