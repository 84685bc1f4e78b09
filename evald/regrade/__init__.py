"""Stored samples are graded again by the config of now: a new revision, without an engine."""
