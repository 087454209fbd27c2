"""SwiGLU, the gated activation of an MLP."""
