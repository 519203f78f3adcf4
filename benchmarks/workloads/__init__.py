"""One module per family of workloads. A module's public name is `WORKLOADS`, a list of harness.Workload.

Modules import torch, torchrec or grpc inside a case's `setup`, never at the top, so that listing names stays quick and
a rival that is not installed stops its own workload only.
"""
