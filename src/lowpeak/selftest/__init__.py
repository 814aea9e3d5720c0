"""`lowpeak env --selftest`: what a machine's GPUs and vLLM do, as a table to paste into an issue."""
