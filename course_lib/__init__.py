"""Gradient accumulation and communication/computation overlap: the library under the labs.

Importing the package imports nothing else: each part is its own module (`course_lib.timeline`,
`course_lib.launch`, `course_lib.lab`, …), so that a reader of traces never waits for torch.
"""

__version__ = "0.1.0"
