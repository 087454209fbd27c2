"""The norm of a gated scan, per head."""
