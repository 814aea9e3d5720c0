"""What the benchmarks share: fresh processes, the task, the probes and the report."""
