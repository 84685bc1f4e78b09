"""Results delivered where people look: W&B, TensorBoard, files, a logger of one's own."""

from evald.results.sinks.following import follow
from evald.results.sinks.rows import Row
from evald.results.sinks.wandb_buffer import WandbBuffer

__all__ = ["Row", "WandbBuffer", "follow"]
