"""The parts of a training loop around a step: progress, logging, accumulation, precision, metrics."""
