"""Readers of training data: batch.py holds the protocol, spec.py the `data` section of a job, registry.py opens them."""
