"""The compatibility matrix: what was tested, on which hardware and software, and what is known."""
