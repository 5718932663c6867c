"""STEP: what stands around a training step: progress, logging, accumulation, precision, metrics."""
