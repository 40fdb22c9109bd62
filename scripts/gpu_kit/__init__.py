"""The GPU kit: one script that proves and measures FastDecode on a machine with a GPU, and writes a report."""
