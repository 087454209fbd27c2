"""Composes and checks the configuration, builds components from `_target_`s, and keeps secrets out
of files."""
