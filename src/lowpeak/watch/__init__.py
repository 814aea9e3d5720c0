"""The watch over a run's ranks."""
