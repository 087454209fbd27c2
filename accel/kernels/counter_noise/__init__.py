"""Random draws that are functions of (seed, purpose, position)."""
