"""Write snapshots from inside a training job; needs torch."""

from evald.trainer.export.exporter import SnapshotExporter, Weights, export_snapshot

__all__ = ["SnapshotExporter", "Weights", "export_snapshot"]
