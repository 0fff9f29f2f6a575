"""Measuring decoders: pictures against prompts, and time against passes."""
