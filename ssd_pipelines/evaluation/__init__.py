"""Measure decoders: how well pictures match their prompts, and passes and wall time."""
