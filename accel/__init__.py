"""Accelerations of a training step: one file per technique, one interface for all, and a ledger
that records which of them were really on.

The code here works on tensors, modules and optimizers. It names no model class, no loader and no
Hydra, and expects of a model only that it has `.blocks`, an nn.ModuleList.
"""
