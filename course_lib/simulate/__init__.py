"""Predicted timelines. `buckets` predicts gradient buckets on one wire; nothing here imports torch."""
