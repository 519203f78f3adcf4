"""Scores a split: forward with look-ups, which neither count as visits nor thaw rows."""

from __future__ import annotations

import numpy as np
import torch

from trainer.data.batch import Reader
from trainer.group import Group
from trainer.metrics import Metrics, compute_metrics
from trainer.models import logits_of
from trainer.precision import Precision


def evaluate(model: torch.nn.Module, reader: Reader, precision: Precision, group: Group) -> Metrics:
    """Metrics over the samples of all workers; each scores its share. The model is left in the mode it was in."""
    was_training = model.training
    model.eval()
    logits, labels = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    try:
        with torch.inference_mode():
            for batch in reader:
                if batch.num_samples:
                    with precision.context():
                        scored = logits_of(model, batch)
                    logits.append(scored.float().numpy())
                    labels.append(batch.labels.numpy())
    finally:
        model.train(was_training)
    return compute_metrics(group.gather(np.concatenate(labels)), group.gather(np.concatenate(logits)))
