"""Attention over a forest: several sequences in one row, and a prompt's completions beside each other, unpadded."""
