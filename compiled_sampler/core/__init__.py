"""The mathematics of a token: order, mass, noise, filters, score. Pure tensor functions; no device, no schedule."""
