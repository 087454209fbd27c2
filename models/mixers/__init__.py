"""Mixers: modules that let the tokens of a grid exchange information. They map (B, L, D) to (B, L,
D), samples × tokens × width, and each fits into every block."""
