"""Loading pipelines, and checking what was loaded."""
