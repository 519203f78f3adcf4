"""Named workloads that measure Frostline beside its rivals: `python -m benchmarks WORKLOAD`. See harness.py."""
