"""Bring published snapshots to another host's staging root."""

from evald.trainer.push.carrier import PushCarrier, carrier_for

__all__ = ["PushCarrier", "carrier_for"]
