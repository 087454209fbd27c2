"""Images, and latents of other tools, into latent sets: what happens once per data set, before any training."""
