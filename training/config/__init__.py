"""The configuration: typed keys, composition, components from `_target_`s, and secrets kept out of
files."""
