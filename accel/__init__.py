"""Accelerations: one file per technique, one contract, and a ledger of what was really on.

This package knows tensors, modules and optimizers. It never names a model, a loader or Hydra, and
it reaches a model only through its `.blocks`.
"""
