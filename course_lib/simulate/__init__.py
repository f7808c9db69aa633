"""Predicted timelines: `buckets` of gradients on one wire, `pipeline` schedules. Nothing here imports torch."""
