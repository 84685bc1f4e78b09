"""Kind ``procedural``: questions that reasoning-gym makes, and its own verifiers.

The library runs in processes of its own, never in the daemon: one writes a set's questions into a
file, once; graders take the answers. Which of its tasks can be had is a checked list (``tasks``).
"""
