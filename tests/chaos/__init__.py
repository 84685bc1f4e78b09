"""Runs of a whole eval node under faults: ``python -m tests.chaos --runs N --seed S``.

A trainer with the real SDK, the daemon and its engines are processes of their own. A seed gives
the trainer's actions and the faults that hit at the same time; afterwards, the ledger, the samples
and the machine must be as if nothing had happened (``invariants.py``).
"""
