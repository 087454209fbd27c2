"""Composes and checks the configuration, builds the objects that its `_target_`s name, and keeps
secrets out of files."""
