"""Readers of training data: batch.py is the protocol, spec.py the `data` section of a job, registry.py opens them."""
