"""The posture whose points somebody else's evaluation measures, in processes of its own."""
