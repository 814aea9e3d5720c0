"""The ways by which weights reach the workers of vLLM."""
