"""Snapshots come in: scan and watch, validation, revisions, retention."""
